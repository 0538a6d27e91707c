"""Export: a hybrid as a folder that others can load, proved equal in a fresh process. One file a format."""
