"""The suite ruler: the tasks of RULER (more/probes/ruler.py) in prompts of each length, and all of them together."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.asking import Asking
from surgery.evaluation.cells import Cell
from surgery.evaluation.contexts import readable
from surgery.evaluation.suites import measured
from surgery.evaluation.task import TaskFamily, bench_seed
from surgery.more.probes.ruler import WRITTEN
from surgery.records.recipe import Bench, Data

PLACE = 30
SUITES = {
    "ruler": "RULER's needles, variables and frequent words, written after prompts of each length of bench.contexts; running "
    "text is the held-out text, words are bench.words."
}
LENGTHS = "only"
COSTLY = True  # prompts are tried until they fit
RULER = "ruler"  # the probe; ruler.1024 is all its tasks together
# Its variable tracking is by four hops.
TASKS: dict[str, dict[str, Any]] = {
    **{name: {"task": name} for name in WRITTEN}, "ruler_vt_1hop": {"task": "ruler_vt", "hops": 1}
}  # fmt: skip
TITLES = dict(zip((*TASKS, RULER), (
    "S-NIAH-1", "S-NIAH-2", "S-NIAH-3", "MK-NIAH-1", "MK-NIAH-2", "MK-NIAH-3", "MV-NIAH", "MQ-NIAH", "VT", "CWE", "FWE",
    "VT, one hop", "all",
), strict=True))  # fmt: skip
PICTURE = ("ruler.png", "RULER against the length of the prompt")
FAMILIES = {
    name: TaskFamily(f"RULER, {title}", "tokens", "tokens of the prompt and what is written", guess=0.0, picture=PICTURE)
    for name, title in TITLES.items()
}
WHOLES = {RULER: "RULER"}


def probes(options: Bench, data: Data) -> dict[str, Asking]:
    if "ruler" not in measured(options):
        return {}
    return {
        f"{name}.{length}": Asking(RULER, {**fields, "words": options.words}, length)
        for name, fields in TASKS.items()
        for length in options.lengths
    }


def names(options: Bench) -> list[str]:
    return [f"{RULER}.{length}" for length in options.lengths if "ruler" in measured(options)]


def pooled(cells: Mapping[str, list[Cell]]) -> dict[str, list[Cell]]:
    """ruler.1024: the cells of all tasks of a length, where there are several."""
    of_length: dict[str, list[list[Cell]]] = {}
    for task, each in cells.items():
        family, _, length = task.partition(".")
        if family in TASKS:
            of_length.setdefault(length, []).append(each)
    return {f"{RULER}.{length}": [*chain(*each)] for length, each in of_length.items() if len(each) > 1}


def check_inputs(options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> None:
    """Raise UserError where the text is too short for the longest prompts."""
    longest = max(readable(options, tokenizer), default=0)
    for name, asking in probes(options, data).items():
        try:
            if asking.length == longest:
                asking.made(options, tokenizer, data).check(bench_seed(seed))
        except UserError as error:
            raise UserError(f"bench, {name}: {error}") from error
