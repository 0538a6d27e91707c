"""Settings that there were: what files of earlier versions hold of them, and what to do instead.

A recipe that leaves such a setting at the default that it had says what this version does anyway, and is read. Another value is
refused in one line, or read as that of the setting that took it over.
"""

from typing import Any, NamedTuple


class Gone(NamedTuple):
    """default: the value that is read and dropped. instead: what to do, after "went with version ...:". heir: the setting of
    the same section that takes other values, where it is not set, or true."""

    version: str
    default: Any
    instead: str
    heir: str = ""


AS_BEFORE = "this version does what its default did; leave it out"
AUTO = {"eval_steps": 25, "examples": 128, "least_gain": 0.02, "patience": 2}
GONE: dict[str, Gone] = {
    "bench.depths": Gone("0.20", [0.0, 0.5, 1.0], AS_BEFORE),
    "bench.doses": Gone("0.20", [], AS_BEFORE),
    "bench.engine_python": Gone("0.20", None, "give --engine-python to the command"),
    "locate.budget": Gone("0.30", 600.0, "set locate.exact: true for all heads, false for attribution alone"),
    "locate.confirm": Gone("0.30", None, "locate.exact takes the share", heir="exact"),
    "plan.donor_heads": Gone("0.22", {}, "heads start from their own weights; take plan.kind=layer"),
    "pretrain.letter_questions": Gone("0.20", 6, AS_BEFORE),
    "pretrain.needles": Gone("0.20", 8, AS_BEFORE),
    "tune.lora.use_dora": Gone("0.20", False, AS_BEFORE),
    "tune.lora.use_rslora": Gone("0.20", False, AS_BEFORE),
    "tune.weight_decay": Gone("0.20", 0.01, AS_BEFORE),
    "tune.align": Gone("0.22", None, "the record shows that it lowers retrieval; leave it out, and set tune.steps"),
    "tune.auto": Gone("0.22", AUTO, "tune.steps: auto measures as its defaults did; leave it out"),
    "tune.cache_bytes": Gone("0.22", 2**30, AS_BEFORE),
    "tune.calibrate": Gone("0.22", None, "plan.by and plan.heads: auto choose the gate; leave it out, and set tune.steps"),
    "tune.curriculum": Gone("0.22", 0.0, AS_BEFORE),
    "tune.repeat": Gone("0.22", None, AS_BEFORE),
}


def gone_of(section: str) -> dict[str, Gone]:
    """Those of a section, by their own names."""
    prefix = f"{section}." if section else ""
    inside = ((name.removeprefix(prefix), gone) for name, gone in GONE.items() if name.startswith(prefix))
    return {name: gone for name, gone in inside if "." not in name}
