"""The suites of lm-evaluation-harness, and what else bench.tasks names of it."""

import sys
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.evaluation.asking import Asking
from surgery.evaluation.cells import digest
from surgery.evaluation.suites import measured
from surgery.evaluation.suites.quick import dictionary
from surgery.evaluation.task import Outcome, Task
from surgery.more import harness
from surgery.records.recipe import Bench, Data
from surgery.records.record import package_version

PLACE = 60
SUITES = {
    "knowledge": "The paper's six knowledge tasks.",
    "documents": "Facts of documents, as completions: SWDE, FDA, SQuAD, TriviaQA, NQ, DROP.",
    "zeroshot": "LAMBADA, PIQA, HellaSwag, WinoGrande, ARC-Easy, ARC-Challenge.",
    "paper": "MMLU, GSM8K, BBH, DREAM, those six, and key-value retrieval at the paper's sizes.",
}
KNOWLEDGE = ("winogrande", "openbookqa", "piqa", "hellaswag", "arc_challenge", "arc_easy")
PAPER = ("mmlu", "gsm8k", "bbh", "dream", *KNOWLEDGE)
PAPER_PAIRS = tuple(range(10, 51, 5))
DOCUMENTS = ("swde", "fda", "squad_completion", "based_triviaqa", "based_nq_2048", "based_drop")
ZEROSHOT = ("lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge")
OF_SUITE = {"paper": PAPER, "knowledge": KNOWLEDGE, "documents": DOCUMENTS, "zeroshot": ZEROSHOT}
NORMED = ("hellaswag", "arc_challenge")  # of which papers print the accuracy by log-likelihoods divided by length, too


def probes(options: Bench, data: Data) -> dict[str, Asking]:
    return {f"kv.{size}": dictionary(size) for size in PAPER_PAIRS if "paper" in measured(options)}


def standard(options: Bench) -> list[str]:
    """The tasks that the harness runs."""
    suites = measured(options)
    asked = [name for suite, several in OF_SUITE.items() if suite in suites for name in several]
    return list(dict.fromkeys([*asked, *options.tasks]))


def names(options: Bench) -> list[str]:
    return [*standard(options), *(norm_of(name) for name in NORMED if "zeroshot" in measured(options))]


def norm_of(name: str) -> str:
    """What a task is called by its length-normalised accuracy."""
    return f"{name}_norm"


def check_inputs(options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> None:
    """Raise UserError for a task that cannot be loaded."""
    _loaded(options)


def tasks(options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> list[Task]:
    normed = NORMED if "zeroshot" in measured(options) else ()
    return [
        made for name, several in _loaded(options).items() for task in several
        for made in _tasks(name, task, options, tokenizer, name in normed)
    ]  # fmt: skip


def _loaded(options: Bench) -> dict[str, list[Any]]:
    asked = standard(options)
    return harness.load(asked, options.include_path, options.data_path) if asked else {}


def _tasks(name: str, task: Any, options: Bench, tokenizer: PreTrainedTokenizerBase, normed: bool) -> list[Task]:
    """One, or with the length-normalised accuracy two, for which a model is asked once."""
    known: WeakKeyDictionary[PreTrainedModel, tuple[dict[str, np.ndarray], tuple[str, ...]]] = WeakKeyDictionary()

    def measure(model: PreTrainedModel, norm: bool) -> Outcome:
        if model not in known:
            known[model] = harness.evaluate(model, tokenizer, task, options.batch_size, options.task_limit)
        scores, digests = known[model]
        values = scores[harness.NORMED] if norm else next(iter(scores.values()))
        return Outcome(values, digests, digest(" ".join(digests)))

    identity = f"{name} {harness.identity(task)} {options.task_limit}"
    there = len(task.eval_docs)
    count, version = min(there, options.task_limit or sys.maxsize), package_version("lm_eval")
    return [
        Task(called, 0, identity, partial(measure, norm=norm), task.config.task, version, count, there)
        for called, norm in ((name, False), (norm_of(name), True))[: 1 + normed]
    ]
