"""Settings that had other names in versions up to 0.6. The old names are read, with a line of advice, until version 1.0."""

from collections.abc import Mapping
from typing import Any

from surgery.errors import UserError

# Section -> old name -> new name. A dictionary instead of a name: what each old value is written as now.
RENAMED: dict[str, dict[str, str | dict[str, dict[str, Any]]]] = {
    "tune": {
        "accumulate": "gradient_accumulation_steps",
        "checkpointing": "gradient_checkpointing",
        "warmup": "warmup_steps",
        "save_every": "save_steps",
        "trackers": "report_to",
        "precision": "mixed_precision",
        "keep": "early_stopping",
    },
    "tune.early_stopping": {"every": "eval_steps"},
    "tune.lora": {
        "kind": {
            "lora": {"use_rslora": False, "use_dora": False},
            "rslora": {"use_rslora": True, "use_dora": False},
            "dora": {"use_rslora": False, "use_dora": True},
        },
        "targets": "target_modules",
        "rank": "r",
        "alpha": "lora_alpha",
        "dropout": "lora_dropout",
    },
    "bench": {"examples": "limit", "task_examples": "task_limit", "tasks_path": "include_path"},
    "pretrain": {"warmup": "warmup_steps"},
}

_advised: set[str] = set()


def current_key(section: str, key: str) -> str:
    """The present name of a section's key."""
    name = RENAMED.get(section, {}).get(key, key)
    return name if isinstance(name, str) else key


def current(tree: Mapping[str, Any], section: str = "", old: dict[str, str] | None = None) -> dict[str, Any]:
    """The keys of a section ("" for a whole recipe), and of the sections in it, by their present names; the rest as it is.

    old: takes every old name that was read -> its present one, both dotted. Raises UserError if a key is there by both names.
    """
    names, result = RENAMED.get(section, {}), dict[str, Any]()
    for key, value in tree.items():
        name = names.get(key, key) if isinstance(key, str) else key
        if isinstance(name, dict):
            if not (isinstance(value, str) and value in name):
                raise UserError(f"{_dotted(section, key)}: '{value}' is none of {', '.join(name)}")
            entries = name[value]
            advice = " or ".join(dict.fromkeys(new for entry in name.values() for new in entry))
        else:
            inner = _dotted(section, name)
            entries = {name: current(value, inner, old) if isinstance(value, Mapping) and inner in RENAMED else value}
            advice = name
        if old is not None and key in names:
            old[_dotted(section, key)] = advice
        if both := set(entries) & (set(result) | (set(tree) if key in names else set())):
            raise UserError(f"{_dotted(section, min(both))} is there by its old name, too ({key}); leave that out")
        result |= entries
    return result


def advise(old: Mapping[str, str]) -> None:
    """One line that names the settings which were read by their old names; of each, once in a process."""
    if new := {key: name for key, name in old.items() if key not in _advised}:
        from surgery.runtime.progress import say

        _advised.update(new)
        listed = ", ".join(f"{key} is now {name}" for key, name in new.items())
        say(f"advice: {listed}; old names are read until version 1.0")


def _dotted(section: str, key: Any) -> str:
    return f"{section}.{key}" if section else str(key)
