"""One file a picture or page. evaluation/views.py says when each is called."""
