"""Tune: data, stages, the loop, adapters."""
