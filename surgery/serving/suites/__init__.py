"""The suites of serving engines: surgery/evaluation/suites/__init__.py finds them, and says what one is."""
