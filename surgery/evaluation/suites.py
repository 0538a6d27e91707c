"""Suites: what `bench.suites` names, as tasks that each give one number an example. SUITES says what each one measures; the
suite speed is in speed.py."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation import harness
from surgery.evaluation.cells import Cell, digest, watched
from surgery.evaluation.contexts import READING_ALONE, readable
from surgery.evaluation.language import sliding_losses, sliding_rows
from surgery.evaluation.results import MIDDLE, NEEDLES, is_loss
from surgery.evaluation.text_hits import ChosenTokens, hit_names, hit_texts, rows_at_once
from surgery.probes import make, probes
from surgery.probes.perplexity import TextWindows
from surgery.probes.question import Completion, CompletionProbe, Probe, Question, Writing, WritingProbe
from surgery.probes.ruler import WRITTEN as RULER_TASKS
from surgery.probes.scoring import answer, answer_shapes, complete, complete_shapes
from surgery.probes.skills import names_of
from surgery.probes.written import write, write_shapes
from surgery.records.recipe import Bench, Data
from surgery.records.record import package_version

KNOWLEDGE = ("winogrande", "openbookqa", "piqa", "hellaswag", "arc_challenge", "arc_easy")
PAPER = ("mmlu", "gsm8k", "bbh", "dream", *KNOWLEDGE)
OF_DATA = ("documents", "zeroshot")
TABLE = ("ruler", *OF_DATA, "speed")  # what the suite `table` is, as far as the data are there
DOCUMENTS = ("swde", "fda", "squad_completion", "based_triviaqa", "based_nq_2048", "based_drop")
ZEROSHOT = ("lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge")
# RULER's variable tracking is by four hops.
OF_RULER: dict[str, dict[str, Any]] = {
    **{name: {"task": name} for name in RULER_TASKS}, "ruler_vt_1hop": {"task": "ruler_vt", "hops": 1}
}  # fmt: skip
NEEDLE, RULER = "needle", "ruler"  # probes whose prompts have a length
# ruler.1024 is all tasks of RULER together.
RULER_TITLES = dict(zip((*OF_RULER, RULER), (
    "S-NIAH-1", "S-NIAH-2", "S-NIAH-3", "MK-NIAH-1", "MK-NIAH-2", "MK-NIAH-3", "MV-NIAH", "MQ-NIAH", "VT", "CWE", "FWE",
    "VT, one hop", "all",
), strict=True))  # fmt: skip
PAPER_PAIRS = tuple(range(10, 51, 5))
DEPTHS = (0.0, 0.5, 1.0)  # where in a text a needle is hidden: 0 at its beginning, 1 at its end
# How many needles are hidden and asked for; needle.1024.50 has one, in the middle.
SEVERAL = dict(zip(NEEDLES, ({"needles": 8}, {"needles": 8, "queries": 4}), strict=True))
# Probes of whose answers it is asked whether greedy decoding would write them, in one forward. Chance is 0.
WRITTEN = tuple(name for name, kind in probes().items() if getattr(kind, "written", False))
NORMED = ("hellaswag", "arc_challenge")  # of which papers print the accuracy by log-likelihoods divided by length, too
WINDOW_ROWS = 4  # of the rows of a batch, what a window of text stands for: it is several times as long as a question


@dataclass(frozen=True)
class Outcome:
    """values: one an example; digests: one an example, of what was asked; inputs: of what entered the model."""

    values: np.ndarray
    digests: tuple[str, ...]
    inputs: str


@dataclass(frozen=True)
class Task:
    """One cell for every model. identity: all that the outcome depends on beside the model and the Conditions. part: which task
    of a group of the harness, as the examples of all are the group's. harness: the version of lm_eval, if that asks. count: how
    many examples it has. shapes: (rows, tokens) of every forward that a model makes; None where the harness makes them."""

    name: str
    seed: int
    identity: str
    measure: Callable[[PreTrainedModel], Outcome]
    part: str = ""
    harness: str | None = None
    count: int = 0
    shapes: Callable[[], list[tuple[int, int]]] | None = None

    def key(self) -> dict[str, Any]:
        """What the outcome depends on, for its cell."""
        return {"task": self.name, "part": self.part, "questions": digest(self.identity), "lm_eval": self.harness}

    @property
    def metric(self) -> Literal["accuracy", "loss"]:
        return "loss" if is_loss(self.name) else "accuracy"


def names(options: Bench, data: Data | None = None) -> list[str]:
    """The tasks of the suites, in the order of the report. Known without a model."""
    result = [*_probes(options), *own_skills(options, data or Data())]
    if "quick" in options.suites:
        result.append("perplexity")
    if "language" in options.suites:
        result.append("sliding")
    result += hit_names(options)
    result += [f"{RULER}.{length}" for length in options.lengths if measures(options, "ruler")]
    return [*result, *standard(options), *(norm_of(name) for name in NORMED if measures(options, "zeroshot"))]


def norm_of(name: str) -> str:
    """What a task of the harness is called by its length-normalised accuracy."""
    return f"{name}_norm"


def pooled(cells: Mapping[str, list[Cell]]) -> dict[str, list[Cell]]:
    """ruler.1024: the cells of all tasks of RULER of a length, where there are several."""
    of_length: dict[str, list[list[Cell]]] = {}
    for task, measured in cells.items():
        family, _, length = task.partition(".")
        if family in OF_RULER:
            of_length.setdefault(length, []).append(measured)
    return {f"{RULER}.{length}": [*chain(*each)] for length, each in of_length.items() if len(each) > 1}


def standard(options: Bench) -> list[str]:
    """The tasks that lm-evaluation-harness runs."""
    of = {"paper": PAPER, "knowledge": KNOWLEDGE, "documents": DOCUMENTS, "zeroshot": ZEROSHOT}
    asked = [name for suite, several in of.items() if measures(options, suite) for name in several]
    return list(dict.fromkeys([*asked, *options.tasks]))


def measures(options: Bench, suite: str) -> bool:
    """Whether a suite is asked for, by itself or as a part of `table`."""
    there = suite in TABLE and (suite not in OF_DATA or options.data_path is not None)
    return suite in options.suites or ("table" in options.suites and there)


def tasks(options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> list[Task]:
    """All tasks of all seeds. An example that an earlier seed asked, too, is not asked twice; a task that cannot ask another
    example (a fixed set of them) has one cell."""
    result: list[Task] = []
    for name, (probe, fields) in (_probes(options) | own_skills(options, data)).items():
        facts = {"source": data.facts, "part": "bench"} if probe in ("knowledge", "letters") else {}
        result += _probe_tasks(name, probe, fields | facts, options, tokenizer, data, seed)
    result += _text_tasks(options, tokenizer, data, seed)
    result += _hit_tasks(options, tokenizer, data, seed)
    if names_of := standard(options):
        loaded = harness.load(names_of, options.include_path, options.data_path)
        normed = NORMED if measures(options, "zeroshot") else ()
        result += [
            made for name in names_of for task in loaded[name]
            for made in _standard_tasks(name, task, options, tokenizer, name in normed)
        ]  # fmt: skip
    return result


def check_probes(options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> None:
    """Raise UserError for a probe that cannot be asked in the sizes of `options`, and where these leave nothing to measure."""
    if not {*options.suites} - READING_ALONE and not options.tasks and not readable(options, tokenizer):
        raise UserError(
            f"bench: nothing is left to measure: {', '.join(options.suites)} (bench.suites) needs lengths in bench.contexts"
        )
    for name, (probe, fields) in _probes(options).items():
        try:
            asks: Any = _made(probe, fields, options, tokenizer, data)
            if probe == NEEDLE and asks is not None:
                # The text may be too short for any question, the shortest length for one of them.
                shortest = asks.length == min(options.lengths)
                asks.check(options.limit if shortest else 1, bench_seed(seed))
            elif probe == RULER and asks is not None and asks.length == max(readable(options, tokenizer)):
                asks.check(bench_seed(seed))
        except UserError as error:
            raise UserError(f"bench, {name}: {error}") from error


def bench_seed(seed: int) -> int:
    """Other examples than those that locate ranked heads with."""
    return seed + 10_000


def examples(
    probe: Probe | CompletionProbe | WritingProbe, written: bool, n: int, seed: int
) -> list[Question] | list[Completion] | list[Writing]:
    """What a probe asks. written: of the answer to a question only whether the model would write it."""
    if isinstance(probe, CompletionProbe):
        return probe.completions(n, seed)
    if isinstance(probe, WritingProbe):
        return probe.writings(n, seed)
    questions = probe.questions(n, seed)
    return [Completion(q.prompt, q.choices[q.answer]) for q in questions] if written else questions


def _probes(options: Bench) -> dict[str, tuple[str, dict[str, Any]]]:
    """Task -> the probe and its options."""
    pairs = [*(options.pairs if {"quick", "retrieval"} & {*options.suites} else ())]
    pairs += [size for size in PAPER_PAIRS if "paper" in options.suites and size not in pairs]
    result: dict[str, tuple[str, dict[str, Any]]] = {f"kv.{size}": ("kv", {"pairs": size, "keys": "lessons"}) for size in pairs}
    if {"quick", "retrieval"} & {*options.suites}:
        unseen = options.pairs[-1:] if options.unseen_pairs is None else options.unseen_pairs
        result |= {f"kv_unseen.{size}": ("kv", {"pairs": size, "keys": "unseen"}) for size in unseen}
    if "retrieval" in options.suites:
        for name in sorted({*probes()} - {"kv", "knowledge", "letters", NEEDLE, RULER}):
            result |= {f"{name}.{size}": (name, fields) for size in options.pairs if (fields := sized_options(name, size))}
        for length in options.lengths:
            for depth in DEPTHS:
                result[f"needle.{length}.{round(100 * depth)}"] = (NEEDLE, {"length": length, "depth": depth})
    if "length" in options.suites:
        for length in options.lengths:
            result[f"needle.{length}.{MIDDLE}"] = (NEEDLE, {"length": length, "depth": MIDDLE / 100})
        for name, several in SEVERAL.items():
            result |= {f"{name}.{length}": (NEEDLE, {"length": length, **several}) for length in options.lengths}
    if measures(options, "ruler"):
        for name, fields in OF_RULER.items():
            result |= {f"{name}.{length}": (RULER, {"length": length, **fields}) for length in options.lengths}
    if "quick" in options.suites:
        result |= {name: (name, {}) for name in ("knowledge", "letters")}
    return result


def own_skills(options: Bench, data: Data) -> dict[str, tuple[str, dict[str, Any]]]:
    """Those of data.skills that no suite measures: task -> the probe and its options."""
    if data.skills == "auto" or "quick" not in options.suites:
        return {}
    known = {"knowledge", "letters", *(f"kv.{size}" for size in options.pairs)}
    asked = {name: (skill.probe, {**skill.options}) for name, skill in zip(names_of(data.skills), data.skills, strict=True)}
    return {name: asked[name] for name in asked if name not in known and not (name == "kv" and options.pairs)}


def sized_options(name: str, size: int) -> dict[str, Any] | None:
    """A probe's options for a size, its first option: the number of what is to be remembered. None if it takes no such size.
    What else has no default is four times as large (a text among whose words the content words stand)."""
    needed = [field for field in dataclasses.fields(probes()[name]) if field.default is dataclasses.MISSING]
    fields: dict[str, Any] = {field.name: size if i == 0 else 4 * size for i, field in enumerate(needed)}
    try:
        make(name, **fields)
    except UserError:
        return None
    return fields


def _probe_tasks(
    name: str, probe: str, fields: dict, options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int
) -> list[Task]:
    asks: Any = _made(probe, fields, options, tokenizer, data)
    if asks is None:
        return []
    result: list[Task] = []
    known: set = set()
    for s in range(seed, seed + options.seeds):
        drawn = examples(asks, probe in WRITTEN, options.limit, bench_seed(s))
        fresh = tuple(example for example in drawn if example not in known)
        known |= {*drawn}
        if fresh:
            digests = tuple(digest(repr(example)) for example in fresh)
            if isinstance(fresh[0], Writing):
                result.append(_writing_task(name, s, fresh, digests, options, tokenizer))
                continue
            written = isinstance(fresh[0], Completion)
            ask: Callable = complete if written else answer
            shapes_of: Callable = complete_shapes if written else answer_shapes

            def measure(
                model: PreTrainedModel, fresh: tuple = fresh, digests: tuple[str, ...] = digests, ask: Callable = ask
            ) -> Outcome:
                with watched(model) as inputs:
                    correct = ask(model, tokenizer, fresh, options.batch_size).correct
                return Outcome(correct.astype(float), digests, inputs())

            shapes = partial(shapes_of, tokenizer, fresh, options.batch_size)
            result.append(Task(name, s, f"{name} {' '.join(digests)}", measure, count=len(fresh), shapes=shapes))
    return result


def _writing_task(
    name: str, seed: int, asked: Sequence[Any], digests: tuple[str, ...], options: Bench, tokenizer: PreTrainedTokenizerBase
) -> Task:
    together = options.batch_size * options.window

    def measure(model: PreTrainedModel) -> Outcome:
        # What models write differs, and is read by them; what they were asked does not.
        return Outcome(write(model, tokenizer, asked, together), digests, digest(" ".join(digests)))

    shapes = partial(write_shapes, tokenizer, asked, together)
    return Task(name, seed, f"{name} {' '.join(digests)}", measure, count=len(asked), shapes=shapes)


def _made(probe: str, fields: dict[str, Any], options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data) -> Any:
    """The probe, in the held-out text if it has a length; None where the model does not read that much."""
    if probe not in (NEEDLE, RULER):
        return make(probe, tokenizer=tokenizer, **fields)
    if fields["length"] not in readable(options, tokenizer):
        return None
    words = {"words": options.words} if probe == RULER else {}
    return make(probe, tokenizer=tokenizer, **fields, **words, source=data.held_out_text)


def _text_tasks(options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> list[Task]:
    together = max(1, options.batch_size // WINDOW_ROWS)
    text = TextWindows(data.held_out_text, options.windows, options.window)
    texts: list[tuple[str, Callable, Callable]] = []
    if "quick" in options.suites:
        texts.append(("perplexity", lambda windows: windows, text.losses))
    if "language" in options.suites:
        texts.append(("sliding", sliding_rows, sliding_losses))
    result: list[Task] = []
    for name, rows_of, losses in texts:
        known: set[str] = set()
        for s in range(seed, seed + options.seeds):
            rows = rows_of(text.token_windows(tokenizer, bench_seed(s)))
            digests = tuple(digest(str(row)) for row in rows.tolist())
            if {*digests} <= known:  # a text file is the same for every seed
                continue
            known |= {*digests}

            def measure(
                model: PreTrainedModel, rows: Tensor = rows, digests: tuple[str, ...] = digests, losses: Callable = losses
            ) -> Outcome:
                with watched(model) as inputs:
                    values = losses(model, rows, together)
                return Outcome(values, digests, inputs())

            shapes = partial(_text_shapes, rows, together)
            result.append(Task(name, s, f"{name} {' '.join(digests)}", measure, count=len(rows), shapes=shapes))
    return result


def _hit_tasks(options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> list[Task]:
    together = max(1, options.batch_size // WINDOW_ROWS)
    result: list[Task] = []
    known: set[str] = set()
    for s in range(seed, seed + options.seeds):
        for name, text in hit_texts(options, tokenizer, data, bench_seed(s)).items():
            digests = tuple(map(digest, text.texts()))
            identity = f"{name} {' '.join(digests)}"
            if identity in known:  # a text file is the same for every seed
                continue
            known.add(identity)
            rows = rows_at_once(options, text.chosen.shape[1], together)

            def measure(
                model: PreTrainedModel, text: ChosenTokens = text, rows: int = rows, digests: tuple[str, ...] = digests
            ) -> Outcome:
                values, inputs = text.losses(model, rows)
                return Outcome(values, digests, inputs)

            shapes = partial(_text_shapes, text.rows.ids, rows)
            result.append(Task(name, s, identity, measure, count=len(digests) if text.chosen.any() else 0, shapes=shapes))
    return result


def _text_shapes(rows: Tensor, batch_size: int) -> list[tuple[int, int]]:
    """(rows, tokens) of every forward over rows of text."""
    return [(len(ids), ids.shape[1]) for ids in rows.split(batch_size)]


def _standard_tasks(name: str, task: Any, options: Bench, tokenizer: PreTrainedTokenizerBase, normed: bool) -> list[Task]:
    """One, or with the length-normalised accuracy two, for which a model is asked once."""
    known: WeakKeyDictionary[PreTrainedModel, tuple[dict[str, np.ndarray], tuple[str, ...]]] = WeakKeyDictionary()

    def measure(model: PreTrainedModel, norm: bool) -> Outcome:
        if model not in known:
            known[model] = harness.evaluate(model, tokenizer, task, options.batch_size, options.task_limit)
        scores, digests = known[model]
        values = scores[harness.NORMED] if norm else next(iter(scores.values()))
        return Outcome(values, digests, digest(" ".join(digests)))

    identity = f"{name} {harness.identity(task)} {options.task_limit}"
    count = min(len(task.eval_docs), options.task_limit or sys.maxsize)
    return [
        Task(called, 0, identity, partial(measure, norm=norm), task.config.task, package_version("lm_eval"), count)
        for called, norm in ((name, False), (norm_of(name), True))[: 1 + normed]
    ]
