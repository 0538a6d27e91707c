"""Further probes: surgery/probes/__init__.py finds them, and says what a probe is."""
