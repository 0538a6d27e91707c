"""Hybrids in serving engines. Runs in the engine's own environment, beside the transformers that it pins, and imports nothing
else of this package."""
