"""Hybrids in serving engines. Runs in the engine's own environment, beside the transformers that it pins: imports of this package
nothing but surgery.errors."""
