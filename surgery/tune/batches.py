"""What a step of tuning sees: a batch of lessons and a batch of text, both from the seed and the step alone.

Batches of documents hold ones of similar length, so that little of them is padding: those of `BUFFER` steps are sorted by
length before they are cut into batches. The batches then come in the order of the first document of each, so that long and
short ones alternate as they were drawn; where all have one length, nothing changes place.
"""

import random
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.probes import make
from surgery.probes.knowledge import PARTS, Knowledge
from surgery.processes import on_main
from surgery.recipe import Bench, Data, Tune
from surgery.records import read_text
from surgery.tune.data import Piece, collate, kv_pieces, padded, probe_pieces
from surgery.tune.leaks import check_apart
from surgery.tune.sources import HELD_OUT, Reading, Source, open_source

BUFFER = 16  # steps whose documents are sorted by length together
QUERIES = 8
SHORTEST = 0.25  # of text_tokens, where the curriculum begins
FIRST_SEED = 1 << 63  # of the questions in lessons: seeds of recipes, which locate and bench use, are far below it


def loaders(
    tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, seed: int, start: int
) -> tuple[DataLoader, DataLoader]:
    """Batches from step `start` on: lessons as (ids, targets), both (b, t), and text as (ids, real), both (b, t), real False on
    padding; or None where `text_batch_size` is 0. Raises UserError in one line for data that cannot be used."""
    _check_lessons(tokenizer, options, data)
    steps, size = options.steps, options.batch_size
    lessons = Lessons(tokenizer, options, seed)
    lesson_loader = DataLoader(
        Subset(lessons, range(start * size, steps * size)), batch_size=size, collate_fn=partial(collate, tokenizer)
    )
    if not (size := options.text_batch_size):
        nothing: Any = range(start * options.batch_size, steps * options.batch_size)  # as many batches, to be divided alike
        return lesson_loader, DataLoader(nothing, batch_size=options.batch_size, collate_fn=_nothing)
    rows = Rows(tokenizer, options, data, seed)
    return lesson_loader, DataLoader(Subset(rows, range(start * size, steps * size)), batch_size=size, collate_fn=pad)


def held_out_windows(
    tokenizer: PreTrainedTokenizerBase, data: Data, options: Tune, count: int, seed: int
) -> tuple[Tensor, Tensor]:
    """`count` rows of text that training never sees, mixed as it mixes them: (ids, real), both (count, longest)."""
    sources = _sources(data, Reading(tokenizer, options.text_tokens, seed, held_out=True))
    drawn = _draw(f"held-out mixture {seed}", [text.weight for text in data.train_text], count)
    return pad([sources[source].row(index) for source, index in drawn])


def check(tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, bench: Bench | None = None) -> None:
    """Find out before the work begins whether the lessons and the text can be had, and whether the bench measures on others:
    their contents are compared."""
    sources = _sources(data, Reading(tokenizer, options.text_tokens, seed=0))
    for source in sources:
        source.row(0)
    _check_lessons(tokenizer, options, data)
    rows = _rows_drawn(options) + (HELD_OUT * options.keep.windows if options.keep else 0)
    trained = [(text.source, source.texts(rows)) for text, source in zip(data.train_text, sources, strict=True)]
    trained += [(path, (read_text(path, "the text in"),)) for path in _lesson_sources(options, ("needle",))]
    if data.held_out_text != "world" and (trained := [item for item in trained if item[0] != "world"]):
        bench = bench or Bench()
        on_main(partial(check_apart, data.held_out_text, trained, bench.windows * bench.window))
    for path in _lesson_sources(options, ("knowledge", "letters")):
        measured = _prompts(data.facts)
        if shared := len(measured & _prompts(path)):
            same = f"{path} holds {shared} of the {len(measured)} facts that are measured (data.facts)"
            raise UserError(f"tune.lessons: {same}; give it another options.source")
    if options.keep is not None:
        for part in PARTS:
            Knowledge(data.facts, part).questions(1, seed=0)


class Lessons(Dataset[list[Piece]]):
    """`steps` batches of sequences; those of a batch are of one lesson, and of one draw of its ranges."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Tune, seed: int):
        self.tokenizer, self.options, self.seed = tokenizer, options, seed
        chosen = _draw(f"lesson {seed}", [lesson.weight for lesson in options.lessons], options.steps)
        self.chosen = [options.lessons[lesson] for lesson, _ in chosen]

    def __len__(self) -> int:
        return self.options.steps * self.options.batch_size

    def __getitem__(self, index: int) -> list[Piece]:
        step = index // self.options.batch_size
        lesson, drawn = self.chosen[step], self.drawn(step)
        if lesson.probe == "kv":
            rng = random.Random(f"dictionary {self.seed} {index}")
            return kv_pieces(rng, drawn["pairs"], lesson.queries or QUERIES)
        seed = FIRST_SEED + random.Random(f"question {self.seed} {index}").getrandbits(63)
        return probe_pieces(make(lesson.probe, tokenizer=self.tokenizer, **drawn), seed)

    def drawn(self, step: int) -> dict[str, Any]:
        """The options of a step's lesson, a number for every range."""
        rng = random.Random(f"size {self.seed} {step}")
        part = progress(self.options, step)

        def draw(value: Any) -> Any:
            if not isinstance(value, tuple):
                return value
            low, high = value
            return rng.randint(low, low + round((high - low) * part))

        return {name: draw(value) for name, value in self.chosen[step].options.items()}


class Rows(Dataset[list[int]]):
    """`steps` batches of rows of text, those of a batch of similar length."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, seed: int):
        self.options = options
        self.sources = _sources(data, Reading(tokenizer, options.text_tokens, seed))
        weights = [text.weight for text in data.train_text]
        self.drawn = _draw(f"mixture {seed}", weights, _rows_drawn(options))
        self._buffer: tuple[int, list[list[int]]] = (-1, [])

    def __len__(self) -> int:
        return self.options.steps * self.options.text_batch_size

    def __getitem__(self, index: int) -> list[int]:
        buffer, place = divmod(index, BUFFER * self.options.text_batch_size)
        if buffer != self._buffer[0]:
            self._buffer = (buffer, self._read(buffer))
        part = SHORTEST + (1 - SHORTEST) * progress(self.options, index // self.options.text_batch_size)
        return self._buffer[1][place][: max(2, round(part * self.options.text_tokens))]

    def _read(self, buffer: int) -> list[list[int]]:
        size = self.options.text_batch_size
        every = BUFFER * size
        rows = [self.sources[source].row(index) for source, index in self.drawn[buffer * every : (buffer + 1) * every]]
        order = sorted(range(every), key=lambda i: len(rows[i]))
        batches = sorted(sorted(order[first : first + size]) for first in range(0, every, size))
        return [rows[i] for batch in batches for i in batch]


def _rows_drawn(options: Tune) -> int:
    """Whole buffers, however many steps there are: a row depends on those that it is sorted with."""
    return -(-options.steps // BUFFER) * BUFFER * options.text_batch_size


def progress(options: Tune, step: int) -> float:
    """How far the curriculum is at a step, from 0 to 1."""
    return min(1.0, step / (options.curriculum * options.steps)) if options.curriculum else 1.0


def pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids, padded with 0 on the right, and which of them are real: (rows, longest) each."""
    ids = padded(rows, 0)
    return ids, torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]


def padding(text: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The share of padding in batches of text."""
    filled, all_of_it = torch.tensor([[real.sum(), real.numel()] for _, real in text]).sum(0).tolist()
    return 1 - filled / all_of_it


def _nothing(_: list[int]) -> None:
    return None


def _sources(data: Data, reading: Reading) -> list[Source]:
    return [open_source(text, reading) for text in data.train_text]


def _draw(key: str, weights: list[float], count: int) -> list[tuple[int, int]]:
    """`count` times one of the weights, and how often it was drawn before. The first of more draws are the same."""
    chosen = random.Random(key).choices(range(len(weights)), weights, k=count)
    before = [0] * len(weights)
    drawn = []
    for one in chosen:
        drawn.append((one, before[one]))
        before[one] += 1
    return drawn


def _lesson_sources(options: Tune, probes: Sequence[str]) -> list[str]:
    """The files that lessons of some probes read."""
    read = [lesson.options.get("source", "world") for lesson in options.lessons if lesson.probe in probes]
    return [source for source in dict.fromkeys(read) if source != "world"]


def _prompts(facts: str) -> set[str]:
    return {question.prompt for question in Knowledge(facts).questions(sys.maxsize, seed=0)}


def _check_lessons(tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data) -> None:
    """Ask every lesson's probe at all combinations of the ends of its ranges, and see that it asks about nothing measured."""
    measured = {Path(getattr(data, key)).resolve(): f"data.{key}" for key in ("held_out_text", "facts")}
    for lesson in options.lessons:
        if lesson.queries is not None and lesson.probe != "kv":
            raise UserError(f"tune.lessons: queries are for kv; the probe '{lesson.probe}' asks one question")
        ends = [value if isinstance(value, tuple) else (value,) for value in lesson.options.values()]
        for values in product(*ends):
            probe: Any = make(lesson.probe, tokenizer=tokenizer, **dict(zip(lesson.options, values, strict=True)))
            source = getattr(probe, "source", None)
            if source and (key := measured.get(Path(source).resolve())):
                where = f"'{source}', which is measured on ({key})"
                raise UserError(f"tune.lessons: '{lesson.probe}' reads {where}; give it another options.source")
            probe_pieces(probe, FIRST_SEED)
