"""The suite quick: dictionaries, the facts that a model is to keep, perplexity, and what decoding costs."""

from transformers import PreTrainedTokenizerBase

from surgery.evaluation.asking import Asking
from surgery.evaluation.decoding import Timing, decode_timing
from surgery.evaluation.suites import measured
from surgery.evaluation.task import Task, TaskFamily
from surgery.evaluation.texts import text_tasks
from surgery.probes.perplexity import TextWindows
from surgery.probes.skills import FACTS, names_of
from surgery.records.recipe import Bench, Data

PLACE = 0
SUITES = {
    "quick": "Key-value retrieval (bench.pairs, and bench.unseen_pairs with keys not used in tuning), knowledge and letters, "
    "perplexity, cost."
}
LOSSES = ("perplexity",)
LENGTHS = "also"
FAMILIES = {
    "kv": TaskFamily("Key-value retrieval", "pairs", "pairs in the dictionary"),
    "kv_unseen": TaskFamily("Key-value retrieval, keys not used in tuning", "pairs", "pairs in the dictionary"),
}


def probes(options: Bench, data: Data) -> dict[str, Asking]:
    return dictionaries(options) | skills(options, data) if "quick" in measured(options) else {}


def dictionaries(options: Bench) -> dict[str, Asking]:
    """Key-value retrieval in all sizes."""
    unseen = options.pairs[-1:] if options.unseen_pairs is None else options.unseen_pairs
    asked = {f"kv.{size}": dictionary(size) for size in options.pairs}
    return asked | {f"kv_unseen.{size}": Asking("kv", {"pairs": size, "keys": "unseen"}) for size in unseen}


def dictionary(size: int) -> Asking:
    """Of so many pairs, with keys that tuning may use."""
    return Asking("kv", {"pairs": size, "keys": "lessons"})


def skills(options: Bench, data: Data) -> dict[str, Asking]:
    """The facts, and those of data.skills that no suite measures."""
    asked = {name: Asking(name, {}, skill=True) for name in reversed(FACTS)}
    if data.skills != "auto":
        known = {*FACTS, *(f"kv.{size}" for size in options.pairs)}
        for name, skill in zip(names_of(data.skills), data.skills, strict=True):
            if name not in known and not (name == "kv" and options.pairs):
                asked[name] = Asking(skill.probe, {**skill.options}, skill=True)
    return asked


def names(options: Bench) -> list[str]:
    return ["perplexity"] if "quick" in measured(options) else []


def tasks(options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> list[Task]:
    if "quick" not in measured(options):
        return []
    return text_tasks("perplexity", lambda windows: windows, TextWindows().losses, options, tokenizer, data, seed)


def timings(options: Bench, contexts: list[int]) -> list[Timing]:
    return [decode_timing(context) for context in contexts] if "quick" in measured(options) else []
