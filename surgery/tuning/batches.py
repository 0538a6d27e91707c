"""The batches of a step of tuning: lessons and text, both determined by the seed and the step alone.

Documents shorter than a row share rows without seeing each other (surgery/hybrids/packed.py), so that every step sees about the
same number of tokens. The rows of `BUFFER` steps are packed together. The mean length of the first documents says how many are
drawn for them; those that do not fit are passed over. Rows of similar length make a batch, so that little of it is padding. The
batches are ordered by their first document, so that long and short ones alternate as they were drawn. Where every document
fills a row, each has its own row and the order does not change.
"""

import dataclasses
import math
import random
import sys
from collections.abc import Sequence
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.probes import make, probes, without_unseen
from surgery.probes.hits import NONE, PairCounts
from surgery.probes.knowledge import Knowledge
from surgery.probes.needle import WORLDS
from surgery.probes.question import PassageProbe, WritingProbe
from surgery.probes.skills import FACTS, same_file, skill_questions, skills_of
from surgery.records.recipe import Bench, Data, Lesson, Skill, Tune
from surgery.records.record import read_text
from surgery.runtime.processes import on_main
from surgery.tuning.draws import Draws, open_sources
from surgery.tuning.leaks import check_apart
from surgery.tuning.packed_rows import pack, pad, pad_packed, pad_packed_with_hits
from surgery.tuning.rare_pairs import training_pairs
from surgery.tuning.renaming import Renaming
from surgery.tuning.sequences import (
    IGNORE,
    EvidenceSpan,
    Piece,
    collate,
    collate_with_evidence,
    kv_pieces,
    probe_pieces,
    question_pieces,
)
from surgery.tuning.text_sources import HELD_OUT, Reading

BUFFER = 16  # steps whose documents are packed together and sorted by length
SAMPLE = 256  # documents whose mean length is taken
QUERIES = 8
FIRST_STEPS = 16  # whose text is looked at for hits before the work begins
FIRST_SEED = 1 << 63  # of the questions in lessons; the seeds of recipes, which locate and bench use, are far below


def loaders(
    tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, seed: int, start: int, pairs: PairCounts | None = None
) -> tuple[DataLoader, DataLoader]:
    """Batches from step `start` on, of lessons and of text.

    Lessons: (ids, targets), both (b, t), without a target where there are none; with hints also what the targets are read from,
    as collate_with_evidence gives it. Text: (ids, real, position_ids), all (b, t), or
    None where `text_batch_size` is 0; real is False on padding, and positions begin again with every document. Where hits have
    a weight, also where the pair of each recall hit occurred before, as pad_packed_with_hits gives it. pairs: those of the
    training text, if they are counted already. Raises UserError for data that cannot be used."""
    _check_lessons(tokenizer, options, data)
    steps, size = options.most_steps, options.batch_size
    if options.lessons:
        lessons: Any = Subset(Lessons(tokenizer, options, seed, data), range(start * size, steps * size))
        collating: Any = collate if options.hints is None else collate_with_evidence
        lesson_loader = DataLoader(lessons, batch_size=size, collate_fn=partial(collating, tokenizer))
    else:
        nothing: Any = range(start * size, steps * size)
        lesson_loader = DataLoader(nothing, batch_size=size, collate_fn=_no_lesson)
    if not (size := options.text_batch_size):
        empty: Any = range(start * options.batch_size, steps * options.batch_size)  # as many batches, divided in the same way
        return lesson_loader, DataLoader(empty, batch_size=options.batch_size, collate_fn=lambda _: None)
    packing: Any = pad_packed
    renaming = None
    if options.hit_weight:
        pairs = training_pairs(tokenizer, data) if pairs is None else pairs
        packing = partial(pad_packed_with_hits, pairs, options.rare)
        renaming = Renaming(tokenizer, pairs, options.rename.rare) if options.rename else None
    rows = Rows(tokenizer, options, data, seed, renaming)
    return lesson_loader, DataLoader(Subset(rows, range(start * size, steps * size)), batch_size=size, collate_fn=packing)


def held_out_windows(
    tokenizer: PreTrainedTokenizerBase, data: Data, options: Tune, count: int, seed: int
) -> tuple[Tensor, Tensor]:
    """`count` excerpts of held-out text from the same mixture as the training text: (ids, real), both (count, longest)."""
    sources = open_sources(data, Reading(tokenizer, options.text_tokens, seed, held_out=True))
    drawn = Draws(f"held-out mixture {seed}", [text.weight for text in data.train_text], count)
    return pad([sources[source].excerpt(index) for source, index in drawn])


def check(tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, bench: Bench | None = None, seed: int = 0) -> None:
    """Raise UserError, before the work begins, for lessons or text that cannot be read, or that bench measures on.

    bench: says how much of the held-out text is measured. seed: the run's, which says how many documents are read."""
    rows = Rows(tokenizer, options, data, seed)
    sources = rows.sources
    for source in sources:
        source.excerpt(0)
    _check_lessons(tokenizer, options, data)
    if options.rename is not None:
        Renaming(tokenizer, training_pairs(tokenizer, data), options.rename.rare)
    _check_hits(tokenizer, options, data, seed)
    documents = max(SAMPLE, len(rows.drawn))
    documents += HELD_OUT * options.early_stopping.windows if options.early_stopping else 0
    trained = [(text.source, source.texts(documents)) for text, source in zip(data.train_text, sources, strict=True)]
    trained += [
        (path, (read_text(path, "the text in"),)) for path in _lesson_sources(options, ("needle",)) if path not in WORLDS
    ]
    if data.held_out_text != "world" and (trained := [item for item in trained if item[0] != "world"]):
        bench = bench or Bench()
        on_main(partial(check_apart, data.held_out_text, trained, bench.windows * bench.window))
    for path in _lesson_sources(options, FACTS):
        if same_file(path, data.facts):
            continue  # which is divided
        measured = _prompts(data.facts)
        if shared := len(measured & _prompts(path)):
            same = f"{path} holds {shared} of the {len(measured)} facts that are measured (data.facts)"
            raise UserError(f"tune.lessons: {same}; give it another options.source")
    for skill in skills_of(data, [lesson.probe for lesson in options.lessons]):
        skill_questions(skill, tokenizer, data, 1, seed)


class Lessons(Dataset[list[Piece]]):
    """The sequences of `steps` batches. Those of a batch belong to one lesson, with the same numbers drawn from its ranges."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Tune, seed: int, data: Data | None = None):
        self.tokenizer, self.options, self.seed, self.data = tokenizer, options, seed, data or Data()
        self._chosen = Draws(f"lesson {seed}", [lesson.weight for lesson in options.lessons], options.most_steps)

    def __len__(self) -> int:
        return self.options.most_steps * self.options.batch_size

    def lesson(self, step: int) -> Lesson:
        """The lesson of a step."""
        return self.options.lessons[self._chosen[step][0]]

    def __getitem__(self, index: int) -> list[Piece]:
        step = index // self.options.batch_size
        lesson, drawn = self.lesson(step), self.drawn(step)
        if lesson.probe == "kv":
            rng = random.Random(f"dictionary {self.seed} {index}")
            return kv_pieces(rng, drawn["pairs"], lesson.queries or QUERIES)
        seed = FIRST_SEED + random.Random(f"question {self.seed} {index}").getrandbits(63)
        if lesson.probe in FACTS:  # in words, or about facts, that bench does not use
            skill = Skill(probe=lesson.probe, options=drawn)
            return question_pieces(skill_questions(skill, self.tokenizer, self.data, 1, seed)[0])
        probe: Any = make(lesson.probe, tokenizer=self.tokenizer, **without_unseen(lesson.probe, drawn))
        return probe_pieces(probe, seed)

    def drawn(self, step: int) -> dict[str, Any]:
        """The options of a step's lesson, with a number drawn from every range."""
        rng, lesson = random.Random(f"size {self.seed} {step}"), self.lesson(step)
        between = {field.name for field in dataclasses.fields(probes()[lesson.probe]) if isinstance(field.default, float)}

        def draw(name: str, value: Any) -> Any:
            if not isinstance(value, tuple):
                return value
            low, high = value
            return rng.uniform(low, high) if name in between else rng.randint(low, high)

        return {name: draw(name, value) for name, value in lesson.options.items()}


class Rows(Dataset[list[list[int]]]):
    """The rows of `steps` batches of text. A row holds one document or several; the rows of a batch have similar lengths.
    renaming: gives the documents other names."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, seed: int, renaming: Renaming | None = None
    ):
        self.options, self.seed, self.renaming = options, seed, renaming
        self.sources = open_sources(data, Reading(tokenizer, options.text_tokens, seed))
        # Whole buffers, however many steps there are: a row depends on all rows that it is packed and sorted with.
        buffers = -(-options.most_steps // BUFFER)
        mixture, weights = f"mixture {seed}", [text.weight for text in data.train_text]
        first = [self._length(*drawn) for drawn in Draws(mixture, weights, SAMPLE)]
        self.per_buffer = math.ceil(BUFFER * options.text_batch_size * options.text_tokens / max(1, sum(first) / SAMPLE))
        self.drawn = Draws(mixture, weights, buffers * self.per_buffer)
        self._buffer: tuple[int, list[list[list[int]]]] = (-1, [])

    def __len__(self) -> int:
        return self.options.most_steps * self.options.text_batch_size

    def __getitem__(self, index: int) -> list[list[int]]:
        buffer, place = divmod(index, BUFFER * self.options.text_batch_size)
        if buffer != self._buffer[0]:
            self._buffer = (buffer, self._read(buffer))
        return self._buffer[1][place]

    def _read(self, buffer: int) -> list[list[list[int]]]:
        size, tokens = self.options.text_batch_size, self.options.text_tokens
        drawn = self.drawn[buffer * self.per_buffer : (buffer + 1) * self.per_buffer]
        documents = [self._document(source, index) for source, index in drawn]
        rows = pack([len(document) for document in documents], BUFFER * size, tokens)
        order = sorted(range(len(rows)), key=lambda i: sum(len(documents[j]) for j in rows[i]))
        batches = sorted(sorted(order[first : first + size]) for first in range(0, len(rows), size))
        return [[documents[j] for j in rows[i]] for batch in batches for i in batch]

    def _document(self, source: int, index: int) -> list[int]:
        ids = self.sources[source].excerpt(index)
        return self.renaming(ids, random.Random(f"names {self.seed} {source} {index}")) if self.renaming else ids

    def _length(self, source: int, index: int) -> int:
        known = self.sources[source].full_length
        return self.options.text_tokens if known else len(self.sources[source].excerpt(index))


def _no_lesson(indices: list[int]) -> tuple[Tensor, Tensor]:
    """A token for each sequence, and nothing to predict."""
    return torch.zeros(len(indices), 1, dtype=torch.long), torch.full((len(indices), 1), IGNORE)


def _lesson_sources(options: Tune, probes: Sequence[str]) -> list[str]:
    """The files that the lessons of these probes read."""
    read = [lesson.options.get("source", "world") for lesson in options.lessons if lesson.probe in probes]
    return [source for source in dict.fromkeys(read) if source != "world"]


def _prompts(facts: str) -> set[str]:
    return {question.prompt for question in Knowledge(facts).questions(sys.maxsize, seed=0)}


def _check_hits(tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, seed: int) -> None:
    """Raise UserError where recall hits alone are to teach retrieval, and the first steps have none."""
    if options.lessons:
        return
    _, text = loaders(tokenizer, options, data, seed, 0)
    if not any((before != NONE).any() for *_, before in islice(text, FIRST_STEPS)):
        raise UserError(
            f"tune.hit_weight: the text of the first {FIRST_STEPS} steps has no recall hit, so that nothing teaches retrieval; "
            "take longer rows (tune.text_tokens) or a larger tune.rare"
        )


def _check_lessons(tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data) -> None:
    """Raise UserError for lessons that cannot be made, at all combinations of the ends of their ranges, or that ask about what
    is measured."""
    known = options.hints is None or options.hit_weight > 0
    for lesson in options.lessons:
        if lesson.queries is not None and lesson.probe != "kv":
            raise UserError(f"tune.lessons: queries are for kv; the probe '{lesson.probe}' asks one question")
        lesson_options = without_unseen(lesson.probe, lesson.options)
        if (keys := lesson_options.get("keys", "lessons")) != "lessons":
            raise UserError(f"tune.lessons: keys are 'lessons', not {keys!r}; the others are for bench alone")
        ends = [value if isinstance(value, tuple) else (value,) for value in lesson_options.values()]
        for values in product(*ends):
            probe: Any = make(lesson.probe, tokenizer=tokenizer, **dict(zip(lesson_options, values, strict=True)))
            if isinstance(probe, WritingProbe):
                raise UserError(f"tune.lessons: '{lesson.probe}' asks for answers in what is written, and is no lesson")
            if isinstance(probe, PassageProbe):
                raise UserError(
                    f"tune.lessons: '{lesson.probe}' asks for tokens of text, and is no lesson; to learn from recall hits, set "
                    "tune.hit_weight"
                )
            source = getattr(probe, "source", None)
            if source and lesson.probe not in FACTS and same_file(source, data.held_out_text):
                other = "source: lessons" if source == "world" else "another source"
                where = f"'{source}', which is measured on (data.held_out_text)"
                raise UserError(f"tune.lessons: '{lesson.probe}' reads {where}; give it {other} (options)")
            known |= any(isinstance(flag, EvidenceSpan) for _, flag in probe_pieces(probe, FIRST_SEED))
    if not known:
        raise UserError(
            "tune.hints: no probe of tune.lessons says where its answers are; kv, mqar, needle and others do, and so do the "
            "recall hits of text (tune.hit_weight)"
        )
