"""Formats of other engines: surgery/exporting/formats/__init__.py finds them, and says what a format is."""
