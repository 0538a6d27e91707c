"""Bench: a base and its hybrids on the same inputs, with intervals; reports and figures."""

from pathlib import Path

TASKS = Path(__file__).parent / "tasks"  # our probes as tasks of lm-evaluation-harness, which other programs read too
