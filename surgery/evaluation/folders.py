"""Folders of this package that other programs read."""

from pathlib import Path

TASKS = Path(__file__).parent / "tasks"  # our probes as tasks of lm-evaluation-harness
