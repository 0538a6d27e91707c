"""Ways of choosing heads beside the default: surgery/choosing/__init__.py finds them, and says what a way is."""
