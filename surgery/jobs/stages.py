"""The stages of a run, what each depends on, and the first to be done again when a run is resumed with other settings."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from surgery.records.recipe import Recipe

# Stage -> the sections and keys of a recipe that are its own. It also depends on the stages before it.
STAGES = {
    "locate": ("model", "tokenizer", "dtype", "device", "seed", "kernels", "locate"),
    "plan": ("plan", "data"),
    "tune": ("tune", "data"),
    "bench": ("bench", "data"),
    "study": ("study",),
}
# What changes nothing of the result.
UNRELATED = ("tune.save_steps", "tune.report_to", "tune.gradient_checkpointing")


class Change(NamedTuple):
    """The first setting that differs, and the stage that it belongs to."""

    stage: str
    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} was {shown(self.before)} and is {shown(self.now)}: going on from {self.stage}"


def first_change(earlier: Recipe, now: Recipe, stages: Iterable[str] = STAGES) -> Change | None:
    """The first of the stages of a run whose own settings are not those of the earlier run; None if all are the same."""
    before, after = earlier.model_dump(mode="json"), now.model_dump(mode="json")
    for stage in stages:
        for section in STAGES[stage]:
            if (differing := first_difference(before[section], after[section], section)) is not None:
                return Change(stage, *differing)
    return None


def first_difference(before: Any, now: Any, key: str) -> tuple[str, Any, Any] | None:
    """(dotted key, value before, value now) of the first setting that is not the same in both; None if there is none."""
    if before == now or key in UNRELATED:
        return None
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return key, before, now
    inner = (first_difference(before.get(name), now.get(name), f"{key}.{name}") for name in dict.fromkeys([*before, *now]))
    return next((difference for difference in inner if difference is not None), None)


def shown(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
