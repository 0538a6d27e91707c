"""Folders in other layouts than transformers': surgery/loading/readers.py finds what reads them, and says what that is."""
