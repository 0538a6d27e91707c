"""Further families: surgery/families/__init__.py finds them, and says what a family is."""
