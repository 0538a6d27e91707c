"""What a hybrid and its base are measured on."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

import pydantic
from pydantic import Field

from surgery.records.sections.section import (
    EXAMPLES,
    TOKENS,
    Count,
    Examples,
    Name,
    Repeats,
    Rows,
    Section,
    Tokens,
    check_tokens,
)
from surgery.runtime.listing import literals

Control = Literal["tuned", "random_site", "same_layer"]


def _suites() -> dict[str, str]:
    """Of each suite of the folders `suites`, what it measures; in the order of a report."""
    files = sorted(literals("suites", "PLACE", "SUITES").values(), key=lambda file: file["PLACE"])
    return {name: said for file in files for name, said in file["SUITES"].items()}


SUITES = _suites()
if TYPE_CHECKING:
    Suite = str
else:
    Suite = Literal[tuple(SUITES)]
TABLE_QUICK = {"limit": 20, "task_limit": 50, "contexts": (512, 1024), "batches": (1,)}

LENGTHS = (256, 1024, 4096)  # of bench.contexts, by default


class Bench(Section):
    """What models are measured on. `random_sites` is for `surgery run` alone."""

    section = "bench"

    suites: tuple[Suite, ...] = Field(default=("quick",), min_length=1)
    """What is measured (`surgery list suites`)."""
    tasks: tuple[str, ...] = ()
    """More tasks of lm-evaluation-harness, by name (`surgery list tasks`)."""
    include_path: Name | None = None
    """A folder of task files (YAML) for lm-evaluation-harness, which are looked for first."""
    data_path: Name | None = None
    """A folder of data sets, each at owner/name as on the Hub, which are looked for before the Hub."""
    task_limit: Count | None = None
    """Examples of each task of lm-evaluation-harness; all by default."""
    pairs: tuple[Count, ...] = (4, 8, 16, 32, 48, 64)
    """Sizes of the dictionaries of KV retrieval, with keys that tuning may use."""
    unseen_pairs: tuple[Count, ...] | None = None
    """Sizes of the dictionaries with keys not used in tuning; by default the last of pairs."""
    limit: int = Field(default=500, ge=2, le=EXAMPLES)
    """Examples of each size and probe, for each seed."""
    seeds: Repeats = 1
    """Draw examples with this many seeds."""
    windows: Examples = 64
    """Windows of text for perplexity, and for hits, whose rows are cut from as much text."""
    window: int = Field(default=256, ge=2, le=TOKENS)
    """Tokens of a window."""
    contexts: tuple[Tokens, ...] | None = None
    """Lengths in tokens at which decoding is timed, prompts are asked, and hits are looked for. For retrieval against length,
    one to sixteen times the trained length is a good choice. By default 256, 1024 and 4096, as far as the tokenizer's
    model_max_length allows; lengths that are given are measured beyond it, too."""
    rare: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """For the suite hits: how often, per million tokens, a pair may occur in the text outside the row. Counted in
    data.train_text; if none is named, in the rest of data.held_out_text."""
    words: Literal["own", "wonderwords"] = "own"
    """For the suite ruler: the words that are keys, the project's own or those of RULER, which need the package
    wonderwords."""
    batches: tuple[Rows, ...] = (1, 8)
    """Batch sizes for the suite speed."""
    concurrencies: tuple[Rows, ...] = (1, 4)
    """Requests at a time, for the suite serving."""
    batch_size: Rows = 64
    """Sequences in a forward pass; windows of text are a quarter as many. The scores do not depend on it."""
    controls: bool | tuple[Control, ...] = True
    """Also measure controls, which a gain needs to count; all, or those that are named. `surgery run`: `tuned`, the
    base tuned without a graft; `random_site`, grafts at random sites of other layers; `same_layer`, grafts at other heads of
    the plan's own layers. `surgery bench`: the base tuned without a graft, as the recipe in the hybrid's folder says."""
    random_sites: Repeats = 2
    """How many draws of random sites; the first is also tuned."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _quick(cls, fields: Any) -> Any:
        """The suite table_quick is the suite table in smaller sizes."""
        suites = fields.get("suites") if isinstance(fields, Mapping) else None
        names = [name.strip() for name in suites.split(",")] if isinstance(suites, str) else suites
        if not isinstance(names, list | tuple) or "table_quick" not in names:
            return fields
        return TABLE_QUICK | fields | {"suites": ["table" if name == "table_quick" else name for name in names]}

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of `contexts`, or the default ones."""
        return LENGTHS if self.contexts is None else self.contexts

    def has(self, control: Control) -> bool:
        """Whether a control is measured."""
        return self.controls if isinstance(self.controls, bool) else control in self.controls

    @pydantic.model_validator(mode="after")
    def _possible(self) -> Self:
        check_tokens(windows=self.windows, window=self.window)
        if {"speed", "table"} & {*self.suites}:
            check_tokens(contexts=max(self.lengths, default=0), batches=max(self.batches, default=0))
        return self
