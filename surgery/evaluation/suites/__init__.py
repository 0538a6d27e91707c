"""Suites: what `bench.suites` names. A file holds one, or several that belong together, and is found by listing this folder and
those of the same name around the core (surgery/more/suites, surgery/serving/suites): a new suite is a new file.

In SUITES a file says what each of its suites measures (`surgery list suites` prints it), in PLACE where it stands among the
others, and in LOSSES which of its tasks are losses (of all others more is better). These are written out, since settings, help
texts and reports read them off the text, and wait for no import. What else a file may hold, the protocol Suites says.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.asking import Asking, check_askings, probe_tasks
from surgery.evaluation.cells import Cell
from surgery.evaluation.contexts import readable
from surgery.evaluation.decoding import Timing
from surgery.evaluation.entries import ModelPool
from surgery.evaluation.task import Task, TaskFamily
from surgery.loading.digests import Conditions
from surgery.records.recipe import Bench, Data
from surgery.runtime.listing import listed


class Suites(Protocol):
    """A file of a folder `suites`. Beside PLACE and SUITES it holds what it needs of the rest. Its functions are called for all
    options: where these do not ask for its suites (`measured`), they have nothing to give."""

    PLACE: int
    SUITES: dict[str, str]

    def probes(self, options: Bench, data: Data) -> dict[str, Asking]:
        """Task -> how a probe is asked. All else follows from that; two suites may ask the same."""

    def names(self, options: Bench) -> list[str]:
        """Its other tasks, known without a model."""

    def tasks(self, options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> list[Task]:
        """The same, of all seeds."""

    def pooled(self, cells: Mapping[str, list[Cell]]) -> dict[str, list[Cell]]:
        """Further tasks, each of which is several others together, from their cells."""

    def timings(self, options: Bench, contexts: list[int]) -> list[Timing]:
        """What is timed, of all models that are there at once."""

    def fields(
        self, models: ModelPool, under: Mapping[str, Conditions], options: Bench, tokenizer: PreTrainedTokenizerBase,
        folder: Path | None,
    ) -> dict[str, dict[str, Any]]:  # fmt: skip
        """Model -> further fields of its ModelReport. under: on what and with what each is measured. folder: that of cells."""

    def groups(self, options: Bench) -> dict[str, tuple[str, ...]]:
        """Suite -> the suites, of whichever file, that it stands for."""

    def check(self, options: Bench) -> None:
        """Raise UserError for what is known without a model, before anything is measured."""

    def check_inputs(self, options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> None:
        """Raise UserError for what cannot be asked, before the work of a job begins."""

    def try_out(self, options: Bench) -> None:
        """Raise UserError if a program of others that it needs is not there, before hours of work that end with it."""

    LOSSES: tuple[str, ...]  # tasks, by the name before the size, that are losses in nats per token: less is better
    LENGTHS: Literal["only", "also"]  # whether what it reads has the lengths of bench.contexts
    FAMILIES: dict[str, TaskFamily]  # by the name before the size; of a needle at one depth, needle.50
    WHOLES: dict[str, str]  # a name that `pooled` gives, before the size -> its title: all of a suite, where guesses are wrong
    COSTLY: bool  # whether making the prompts takes so long that an estimate makes few


@cache
def files() -> tuple[Any, ...]:
    """All Suites, in their order."""
    return tuple(sorted(map(import_module, listed("suites").values()), key=lambda file: file.PLACE))


def having(name: str) -> list[Any]:
    """What the files hold by that name, in their order."""
    return [getattr(file, name) for file in files() if hasattr(file, name)]


def measured(options: Bench) -> set[str]:
    """The suites that are asked for; of one that stands for others, these."""
    groups: dict[str, tuple[str, ...]] = {}
    for of in having("groups"):
        groups |= of(options)
    return {part for suite in options.suites for part in groups.get(suite, (suite,))}


def probes(options: Bench, data: Data) -> dict[str, Asking]:
    """Task -> how a probe is asked. The sizes of one probe stand together, whichever suite asks for them; skills come last."""
    asked: dict[str, Asking] = {}
    for of in having("probes"):
        asked = asked | {name: asking for name, asking in of(options, data).items() if name not in asked}
    order = {family: i for i, family in enumerate(dict.fromkeys(map(_family, asked)))}
    return dict(sorted(asked.items(), key=lambda item: len(order) if item[1].skill else order[_family(item[0])]))


def names(options: Bench, data: Data | None = None) -> list[str]:
    """The tasks of the suites, in the order of the report. Known without a model."""
    others = [name for of in having("names") for name in of(options)]
    return [*probes(options, data or Data()), *sorted(others, key=lambda name: _family(name) in wholes())]


def tasks(options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> list[Task]:
    """All tasks of all seeds. An example that an earlier seed asked, too, is not asked twice; a task that cannot ask another
    example (a fixed set of them) has one cell."""
    asked = [
        task for name, asking in probes(options, data).items()
        for task in probe_tasks(name, asking, options, tokenizer, data, seed)
    ]  # fmt: skip
    return [*asked, *(task for of in having("tasks") for task in of(options, tokenizer, data, seed))]


def pooled(cells: Mapping[str, list[Cell]]) -> dict[str, list[Cell]]:
    """The tasks of all suites that are several others together."""
    return {name: several for of in having("pooled") for name, several in of(cells).items()}


def timings(options: Bench, contexts: list[int]) -> list[Timing]:
    """What is timed."""
    return [timing for of in having("timings") for timing in of(options, contexts)]


def check(options: Bench) -> None:
    """Raise UserError for what is known without a model."""
    for each in having("check"):
        each(options)


def check_inputs(options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> None:
    """Raise UserError for what cannot be asked in the sizes of `options`, and where these leave nothing to measure."""
    if not {*options.suites} - _reading("only") and not options.tasks and not readable(options, tokenizer):
        raise UserError(
            f"bench: nothing is left to measure: {', '.join(options.suites)} (bench.suites) needs lengths in bench.contexts"
        )
    check_askings(probes(options, data), options, tokenizer, data, seed)
    for each in having("check_inputs"):
        each(options, tokenizer, data, seed)


def try_out(options: Bench) -> None:
    """Raise UserError if a program of others that is needed is not there."""
    check(options)
    for each in having("try_out"):
        each(options)


def said_of_long(options: Bench, tokenizer: PreTrainedTokenizerBase) -> str:
    """A sentence on the lengths beyond the tokenizer's model_max_length; empty where there are none, or no suite reads them."""
    beyond = [f"{length:,}" for length in options.lengths if length > tokenizer.model_max_length]
    if not beyond or not _reading("only", "also") & {*options.suites}:
        return ""
    limit = f"the tokenizer's model_max_length is {tokenizer.model_max_length:,}"
    if options.contexts is None:
        return f"not measured: {', '.join(beyond)} tokens, of the default bench.contexts; {limit}"
    return f"warning: bench.contexts {', '.join(beyond)}: {limit}; models may not know such lengths"


@cache
def families() -> dict[str, TaskFamily]:
    """How reports show tasks of several sizes."""
    return {name: family for of in having("FAMILIES") for name, family in of.items()}


@cache
def wholes() -> dict[str, str]:
    """What all tasks of a suite together are called -> its title."""
    return {name: title for of in having("WHOLES") for name, title in of.items()}


@cache
def costly() -> set[str]:
    """The suites whose prompts take long to make."""
    return {name for file in files() if getattr(file, "COSTLY", False) for name in file.SUITES}


def _reading(*lengths: str) -> set[str]:
    """The suites that read rows of the lengths of bench.contexts: only these, or also these."""
    return {name for file in files() if getattr(file, "LENGTHS", None) in lengths for name in file.SUITES}


def _family(task: str) -> str:
    return task.partition(".")[0]
