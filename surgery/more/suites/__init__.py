"""Further suites: surgery/evaluation/suites/__init__.py finds them, and says what one is."""
