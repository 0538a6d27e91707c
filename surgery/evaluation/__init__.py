"""Bench: a base and its hybrids on the same inputs, with intervals; reports and figures."""
