"""Bench: a base and its hybrids on the same inputs, with intervals."""

from surgery.bench.bench import bench
from surgery.bench.report import Report

__all__ = ["Report", "bench"]
