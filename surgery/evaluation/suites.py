"""Suites: what bench measures. A suite is a function of what is given that returns measurements; SUITES names them all.

A measurement asks every model the same and gets one number a question (or document). So a new suite is one function.
"""

import dataclasses
import hashlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.statistics import token_shares
from surgery.evaluation.texts import by_document, open_held_out, token_losses
from surgery.probes import make_probe
from surgery.probes.bigrams import NONE, PairCounts, find_repeats
from surgery.probes.encoded import encode
from surgery.probes.question import Question
from surgery.probes.scoring import answer
from surgery.records.recipe import TOY, Bench, Data
from surgery.tuning.examples import data_skills
from surgery.tuning.text import knows, open_text, text_rows

COUNTED = 2**17  # tokens of the training text in which bigrams are counted: of 10 in a million, one is seen
STRETCH = 256  # tokens of an excerpt of it
TEXT_SHARE = 4  # a window of text is several times as long as a question, so a forward has so many times fewer


@dataclass(frozen=True)
class Given:
    """What a suite makes its measurements of."""

    tokenizer: PreTrainedTokenizerBase
    options: Bench
    data: Data
    seed: int

    @property
    def question_seed(self) -> int:
        """Other questions than those that locate ranked heads by."""
        return self.seed + 10_000

    @property
    def lengths(self) -> tuple[int, ...]:
        """bench.contexts; of its default, those that the tokenizer's model_max_length allows."""
        given = "contexts" in self.options.model_fields_set
        return tuple(n for n in self.options.contexts if given or n <= self.tokenizer.model_max_length)

    def knows(self, source: str) -> bool:
        """Whether the model may know a text or facts. What it cannot know says nothing, so it is not asked."""
        return knows((source,), self.tokenizer)


@dataclass(frozen=True)
class Measurement:
    """What all models are asked. ask(model) gives one number a question, (n,). digest: sha256 of what is asked, in tokens.
    questions: of a probe; a control may ask them in another way."""

    name: str
    label: str
    short: str
    metric: Literal["accuracy", "loss"]
    digest: str
    ask: Callable[[Any], np.ndarray] = field(repr=False)
    chance: float | None = None
    questions: tuple[Question, ...] = field(default=(), repr=False)


def quick(given: Given) -> list[Measurement]:
    """Dictionaries, with seen and unseen keys; the skills that an edit must not cost; the loss on held-out text."""
    return [*kv(given), *skills(given), *text(given)]


def kv(given: Given) -> list[Measurement]:
    """Dictionaries of each size (bench.pairs), with keys that tuning may use, and with others (bench.unseen_pairs)."""
    options = given.options
    apart = f", {options.between} words between key and value" if options.between else ""
    unseen = options.pairs[-1:] if options.unseen_pairs is None else options.unseen_pairs
    asked = [("kv", size, "seen", "") for size in options.pairs]
    asked += [("kv_unseen", size, "unseen", ", keys not used in tuning") for size in unseen]
    return [
        ask_probe(
            given,
            f"{name}.{size}",
            f"dictionaries of {size} pairs{apart}{more}",
            f"{size} pairs{', new keys' * bool(more)}",
            "kv",
            pairs=size,
            keys=keys,
            between=options.between,
        )
        for name, size, keys, more in asked
    ]


def skills(given: Given) -> list[Measurement]:
    """What an edit must not cost (data.skills): by default facts, and multiple choice about them."""
    return [measurement for name, _ in data_skills(given.data) for measurement in _skill(given, name)]


def multiple_choice(given: Given) -> list[Measurement]:
    """Facts (data.facts) as multiple choice, whose letter has to be retrieved."""
    return _skill(given, "choice")


def knowledge(given: Given) -> list[Measurement]:
    """Facts (data.facts) as sentences to be completed."""
    return _skill(given, "knowledge")


def _skill(given: Given, probe: str) -> list[Measurement]:
    words = {"choice": ("multiple_choice", "multiple choice", "multiple choice"), "knowledge": ("knowledge", "facts", "facts")}
    if not given.knows(given.data.facts):
        return []
    name, label, short = words[probe]
    return [ask_probe(given, name, label, short, probe, source=given.data.facts, part="bench")]


def needle(given: Given) -> list[Measurement]:
    """A number told in the middle of held-out text, in prompts of each length (bench.contexts)."""
    return _needles(given, "needle", "a needle in", "needle", depth=0.5)


def _needles(given: Given, name: str, label: str, short: str, **options: Any) -> list[Measurement]:
    if not given.knows(given.data.held_out_text):
        return []
    options |= {"source": given.data.held_out_text}
    return [
        ask_probe(given, f"{name}.{n}", f"{label} {n:,} tokens", f"{short}, {n:,}", "needle", length=n, **options)
        for n in given.lengths
    ]


def text(given: Given) -> list[Measurement]:
    """The loss per token on windows of held-out text, paired over documents."""
    return _text_of(given, "text", "held-out text", "loss on text", given.options.windows, given.options.window)


def lengths(given: Given) -> list[Measurement]:
    """The same at several lengths (bench.contexts): a needle, one of eight, and the loss per token on held-out text."""
    tokens = given.options.windows * given.options.window
    rows = [
        _text_of(given, f"text.{n}", f"held-out text in rows of {n:,} tokens", f"text, {n:,}", max(1, tokens // n), n)
        for n in given.lengths
    ]
    eight = _needles(given, "needles", "one of 8 needles in", "8 needles", needles=8)
    return [*needle(given), *eight, *(measurement for of_length in rows for measurement in of_length)]


def bigrams(given: Given) -> list[Measurement]:
    """The loss on repeated rare bigrams of held-out text, and on its other tokens, in rows of each length (bench.contexts)."""
    if not given.knows(given.data.held_out_text):
        return []
    options, result = given.options, list[Measurement]()
    tokens = max(options.windows * options.window, max(given.lengths, default=0))
    counts, within = _count_bigrams(given)
    held = open_held_out(given.tokenizer, given.data, tokens, given.question_seed)
    for n in given.lengths:
        rows, _ = held.rows(max(1, tokens // n), n)
        repeated = find_repeats(rows.numpy(), counts, given.data.rare, within=within) != NONE
        if not repeated.any():
            raise UserError(
                f"{held.name} has no repeated rare bigrams in rows of {n} tokens: take more text (bench.windows), longer rows "
                "(bench.contexts) or a larger data.rare"
            )
        others = ~repeated
        others[:, 0] = False
        losses = RowLosses(rows, max(1, options.batch_size // TEXT_SHARE))
        for name, what, chosen in (("bigrams", "repeated rare bigrams", repeated), ("other_tokens", "other tokens", others)):
            result.append(
                _chosen_tokens(given, f"{name}.{n}", f"{what} in rows of {n:,} tokens", f"{what}, {n:,}", losses, chosen)
            )
    return result


def speed(given: Given) -> list[Measurement]:
    """The time of reading, beside that of decoding and the cache, which are measured with every suite (bench.contexts)."""
    return []  # costs.py measures it, all models in turn


SUITES: dict[str, Callable[[Given], list[Measurement]]] = {
    "quick": quick,
    "kv": kv,
    "multiple_choice": multiple_choice,
    "knowledge": knowledge,
    "needle": needle,
    "text": text,
    "bigrams": bigrams,
    "lengths": lengths,
    "speed": speed,
}


def measurements(given: Given) -> list[Measurement]:
    """Those of all suites of bench.suites; one that two suites make is made once. Raises UserError where there is nothing to
    ask."""
    made = [measurement for suite in given.options.suites for measurement in SUITES[suite](given)]
    unique = {measurement.name: measurement for measurement in made}
    if not unique and not given.options.tasks:
        raise UserError(f"bench.suites={','.join(given.options.suites)} leaves nothing to measure for this model and data")
    return list(unique.values())


def ask_probe(given: Given, name: str, label: str, short: str, probe: str, **options: Any) -> Measurement:
    """The measurement of a probe's questions. Raises UserError where it cannot be asked."""
    try:
        drawn = make_probe(probe, given.tokenizer, **options).questions(given.options.limit, given.question_seed)
    except UserError as error:
        raise UserError(f"bench, {label}: {error}") from error
    return ask_questions(given.tokenizer, given.options, name, label, short, tuple(drawn))


def ask_questions(
    tokenizer: PreTrainedTokenizerBase, options: Bench, name: str, label: str, short: str, questions: tuple[Question, ...]
) -> Measurement:
    """The measurement of questions: whether each is answered correctly."""
    encoded = encode(tokenizer, questions)
    seen = [encoded.rows, encoded.points.tolist(), encoded.terms.tolist(), encoded.answers.tolist()]
    chance = float(np.mean([question.chance for question in questions]))

    return Measurement(
        name,
        label,
        short,
        "accuracy",
        digest(seen),
        lambda model: answer(model, tokenizer, encoded, options.batch_size).correct.astype(float),
        chance,
        questions,
    )


def twice(measurement: Measurement, given: Given) -> Measurement | None:
    """The measurement in which every prompt is read twice, as in "Just read twice" (arXiv 2407.05483); None where it has no
    questions."""
    if not measurement.questions:
        return None
    again = tuple(
        dataclasses.replace(q, prompt=f"{q.prompt}\n\n{q.prompt}", spans=(), evidence=None) for q in measurement.questions
    )
    return ask_questions(given.tokenizer, given.options, measurement.name, measurement.label, measurement.short, again)


def digest(seen: Any) -> str:
    """sha256 of what is asked."""
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def _text_of(given: Given, name: str, label: str, short: str, count: int, length: int) -> list[Measurement]:
    if not given.knows(given.data.held_out_text):
        return []
    rows, owner = open_held_out(given.tokenizer, given.data, count * length, given.question_seed).rows(count, length)
    batch = max(1, given.options.batch_size // TEXT_SHARE)
    asked = digest([rows.tolist(), owner.tolist()])
    return [Measurement(name, label, short, "loss", asked, lambda model: by_document(token_losses(model, rows, batch), owner))]


class RowLosses:
    """The losses of rows of text (n, t). Two measurements choose among the same tokens, one after the other: what was computed
    for one is kept for the other, if that asks next, and for the same model."""

    def __init__(self, rows: torch.Tensor, batch: int):
        self.rows, self.batch = rows, batch
        self._last: tuple[weakref.ref, str, np.ndarray] | None = None

    def __call__(self, model: Any, measurement: str) -> np.ndarray:
        last, self._last = self._last, None
        if last is not None and last[0]() is model and last[1] != measurement:
            return last[2]
        losses = token_losses(model, self.rows, self.batch)
        self._last = weakref.ref(model), measurement, losses
        return losses


def _chosen_tokens(given: Given, name: str, label: str, short: str, losses: RowLosses, chosen: np.ndarray) -> Measurement:
    """The loss on some tokens of rows. An example is a stretch of bench.window tokens of a row, whatever the length of the
    rows, and its value is its share in the mean loss of all chosen tokens."""
    counted = chosen[:, 1:].astype(float)

    def by_stretch(values: np.ndarray) -> np.ndarray:
        whole = np.concatenate((np.zeros((len(values), 1)), values), 1)
        return np.add.reduceat(whole, np.arange(0, whole.shape[1], given.options.window), axis=1).ravel()

    asked = digest([losses.rows.tolist(), np.argwhere(chosen).tolist(), given.options.window])
    return Measurement(
        name,
        label,
        short,
        "loss",
        asked,
        lambda model: token_shares(by_stretch(losses(model, name) * counted), by_stretch(counted)),
    )


def _count_bigrams(given: Given) -> tuple[PairCounts, bool]:
    """The bigrams by which rarity is judged, and whether the held-out text is part of what was counted: those of the training
    text; or, if none is named and the held-out text is a file, those of that file."""
    data = given.data
    if data.held_out_text != TOY and data.train_text == (TOY,):
        return PairCounts(open_held_out(given.tokenizer, data, None, given.question_seed).documents), True
    count, length = COUNTED // STRETCH, STRETCH
    rows, _ = text_rows(open_text(data.train_text, data.column), given.tokenizer, length, range(count), 0)
    return PairCounts(rows.numpy()), False
