"""What docs/contributing/campaigns.md says, from the records that `make campaign` writes: recipes/kills.json and
recipes/fuzz.json."""

import json
from pathlib import Path
from typing import Any

from surgery.evaluation.markdown import table

RECIPES = Path(__file__).parent.parent / "recipes"
KILLS, FUZZ = RECIPES / "kills.json", RECIPES / "fuzz.json"
KINDS = {
    "kill": "killed as it was about to change a file",
    "tear": "killed with half of what it wrote on the disk",
    "moment": "killed at a random moment",
    "term": "SIGTERM",
    "int": "Ctrl-C",
    "full": "a disk that is full from then on",
    "read-only": "a disk that is read-only from then on",
}


def kills() -> str:
    """Which interruptions there were, and what came of them."""
    if not KILLS.exists():
        return "There is no record yet: `python -m tests.campaign.kills` makes one."
    record = json.loads(KILLS.read_text())
    rows = [[words, f"{record['by_kind'].get(kind, 0):,}"] for kind, words in KINDS.items()]
    return f"""{table(["interruption", "how often"], rows)}

{record["trials"]:,} trials of {len(record["by_call"])} commands with {record["interruptions"]:,} interruptions; in \
{record["ended_before"]:,} the command was done before one came. {_failures(len(record["failures"]))} \
{_measured(record["environment"])}, seed {record["seed"]}, {record["seconds"] / 60:.0f} minutes of trials \
(`recipes/kills.json`)."""


def fuzz() -> str:
    """Which inputs were spoilt, and what came of them."""
    if not FUZZ.exists():
        return "There is no record yet: `python -m tests.campaign.fuzz` makes one."
    record = json.loads(FUZZ.read_text())
    rows = [_row(name, record["kinds"][name]) for name in sorted(record["kinds"])]
    header = ["what was spoilt", "inputs", "refused", "accepted", "failures", "longest, s of a processor", "most memory, MiB"]
    return f"""{table(header, [*rows, _row("all", record)])}

{_failures(record["failures"])}{_again(record["codes"])} {_measured(record)}, seed {record["seed"]} (`recipes/fuzz.json`)."""


def _row(name: str, counts: dict[str, Any]) -> list[str]:
    numbers = [f"{counts[key]:,}" for key in ("inputs", "refused", "accepted", "failures")]
    return [name, *numbers, f"{counts['longest_processor_seconds']:.1f}", f"{counts['largest_bytes'] / 2**20:.0f}"]


def _again(codes: dict[str, int]) -> str:
    """Inputs of which a failure was mended meet the code that mended it."""
    rest = sum(codes.values()) - max(codes.values())
    return f" {rest} of them had failed before what they found was mended, and were run again." if rest else ""


def _failures(count: int) -> str:
    return f"{count:,} of them failed." if count else "None of them failed."


def _measured(environment: dict[str, Any]) -> str:
    return f"Measured {environment['created'][:10]} on {environment['machine']}, version {environment['toolkit']}"
