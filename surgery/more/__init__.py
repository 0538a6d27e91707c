"""Further plug-ins, one file each: families (`families/`), probes (`probes/`), suites (`suites/`), ways of choosing heads
(`ways/`); and what only they need."""

from pathlib import Path

TASKS = Path(__file__).parent / "tasks"  # our probes as tasks of lm-evaluation-harness, which other programs read too
