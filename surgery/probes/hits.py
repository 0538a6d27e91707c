"""Recall hits in running text: tokens that complete a pair which occurred before in the context, and is rare elsewhere.

Most of what attention gains over recurrences on natural text sits there (Zoology, arXiv 2312.04927, section 3, which calls them
associative-recall hits). Rare means rare in the training data there; as those of a checkpoint are mostly unknown, here it means
rare in a text of the same kind, outside the row. All tokens of a text are looked at, in those of the model's own tokenizer; the
probe `recall` asks for single words instead, one a question.
"""

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.probes.question import Passage
from surgery.records.record import read_text

GAP = 8  # tokens between the two occurrences of a pair, at least: a refrain of a few tokens is no recall
BITS = 32  # of a token's number
SECOND = (1 << BITS) - 1  # of a pair's number, these bits are its second token
NONE = -1  # instead of a pair's number or place, where there is no pair


class PairCounts:
    """How often each pair of neighbouring tokens occurs in some text. tokens: how many tokens that is."""

    def __init__(self, stretches: Iterable[np.ndarray]):
        """stretches: token ids (t,) of text that runs on within each of them."""
        kept = [np.asarray(ids, dtype=np.int64) for ids in stretches]
        self.tokens = sum(map(len, kept))
        numbers = np.concatenate([_pairs(ids[None])[0] for ids in kept]) if kept else np.empty(0, dtype=np.int64)
        self._numbers, self._counts = np.unique(numbers[numbers != NONE], return_counts=True)

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """How often the pairs with these numbers occur there; an array of the same shape."""
        if not len(self._numbers):
            return np.zeros(numbers.shape, dtype=np.int64)
        places = np.searchsorted(self._numbers, numbers).clip(max=len(self._numbers) - 1)
        return np.where(self._numbers[places] == numbers, self._counts[places], 0)

    def token_counts(self, tokens: int) -> np.ndarray:
        """(tokens,): how often each token occurs there as the second of a pair, so anywhere but at a stretch's beginning."""
        return np.bincount(self._numbers & SECOND, self._counts, minlength=tokens).astype(np.int64)


def hits(
    rows: np.ndarray, counts: PairCounts, rare: float, *, within: bool, documents: np.ndarray | None = None, gap: int = GAP
) -> np.ndarray:
    """(rows, t) bool: which tokens of rows (rows, t) of token ids are hits.

    A token is one where the pair that it ends stood in the same row before, last at least `gap` tokens before, and stands
    elsewhere in the text of `counts` at most `rare` times per million tokens. within: whether the rows are part of that text;
    what is in the row itself then does not count. documents (rows, t): the number of the document that a token belongs to,
    where a row holds several; none sees another.
    """
    return seen_before(rows, counts, rare, within=within, documents=documents, gap=gap) != NONE


def seen_before(
    rows: np.ndarray, counts: PairCounts, rare: float, *, within: bool, documents: np.ndarray | None = None, gap: int = GAP
) -> np.ndarray:
    """As `hits`, and of every hit where in its row the same pair ended last before it: (rows, t) int, NONE of other tokens."""
    rows = np.asarray(rows, dtype=np.int64)
    numbers = _pairs(rows, documents)
    count, width = rows.shape
    places = np.arange(rows.size)
    # One document of one row is one context. Its number comes first, so that pairs of different contexts are never the same.
    contexts = places // width if documents is None else _contexts(documents)
    order = np.lexsort((places, numbers.ravel(), contexts))
    number, context, place = numbers.ravel()[order], contexts[order], places[order]
    again = np.zeros(len(order), dtype=bool)
    again[1:] = (number[1:] == number[:-1]) & (context[1:] == context[:-1]) & (number[1:] != NONE)
    far = np.zeros(len(order), dtype=bool)
    far[1:] = place[1:] - place[:-1] >= gap
    elsewhere = counts.of(number)
    if within:
        elsewhere = elsewhere - _alike(place // width, number)
    before = np.full(rows.size, NONE, dtype=np.int64)
    is_hit = again & far & (elsewhere <= rare * counts.tokens / 1e6)
    before[order] = np.where(is_hit, np.roll(place, 1) % width, NONE)
    return before.reshape(count, width)


def by_stretch(values: np.ndarray, stretch: int) -> np.ndarray:
    """values (rows, t - 1), of the second and all further tokens of rows of t -> their sum in every stretch of `stretch`
    tokens of every row, in order, (stretches,)."""
    whole = np.concatenate((np.zeros((len(values), 1)), values), 1)
    return np.add.reduceat(whole, np.arange(0, whole.shape[1], stretch), axis=1).ravel()


def _pairs(rows: np.ndarray, documents: np.ndarray | None = None) -> np.ndarray:
    """(rows, t): the number of the pair that each token ends; NONE where a text begins."""
    numbers = np.full(rows.shape, NONE, dtype=np.int64)
    numbers[:, 1:] = (rows[:, :-1] << BITS) | rows[:, 1:]
    if documents is not None:
        numbers[:, 1:][documents[:, 1:] != documents[:, :-1]] = NONE
    return numbers


def _alike(row: np.ndarray, number: np.ndarray) -> np.ndarray:
    """(places,): how often the same number occurs in the same row."""
    order = np.lexsort((number, row))
    row, number = row[order], number[order]
    begins = np.flatnonzero(np.r_[True, (row[1:] != row[:-1]) | (number[1:] != number[:-1])])
    lengths = np.diff(np.r_[begins, len(order)])
    counts = np.empty(len(order), dtype=np.int64)
    counts[order] = np.repeat(lengths, lengths)
    return counts


def _contexts(documents: np.ndarray) -> np.ndarray:
    """(rows * t,): a number for each document of each row."""
    begins = np.ones(documents.shape, dtype=bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return begins.ravel().cumsum()


COUNTED = 2**20  # characters of other text in which pairs are counted: some 250,000 tokens
MOST_TOKENS = 2**16  # of a row


@dataclass(frozen=True)
class Hits:
    """Recall hits of running text, all of a row at once: tokens that complete a rare pair which occurred before in the row.

    source: a text file, or a list of them; which heads carry names depends on the names, so that several texts say more than
    one. elsewhere: another text file, or a folder of them, in which pairs are counted: those that come `rare` times per million
    tokens there, or less, are rare. Without it, they are counted in the other rows of the source, where the names that run
    through all of it are not rare. tokens: of a row.
    """

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    source: str | list[str]
    elsewhere: str | None = None
    tokens: int = 512
    rare: float = 10.0

    def __post_init__(self) -> None:
        if not self._sources:
            raise UserError("hits takes a text file, or a list of them (options.source)")
        if self.elsewhere == "" or "" in self._sources:
            raise UserError("hits: '' is no text (options.source, options.elsewhere)")
        if self.elsewhere is not None and _same_file(self.elsewhere, self._sources):
            raise UserError(
                "hits: source and elsewhere are one text; leave elsewhere out, and pairs are counted in its other rows"
            )
        if not 2 * GAP <= self.tokens <= MOST_TOKENS:
            raise UserError(f"hits takes rows of {2 * GAP} to {MOST_TOKENS:,} tokens, not {self.tokens}")
        if not 0 <= self.rare < float("inf"):
            raise UserError(f"hits takes a finite number of pairs per million tokens of at least 0, not {self.rare}")

    def passages(self, n: int, seed: int) -> list[Passage]:
        """Rows that follow one another in the text, those without hits left out, in random order. Raises UserError where the
        text cannot be read, is shorter than a row, or has no hits."""
        return random.Random(f"hits {seed}").sample(self._rows, min(n, len(self._rows)))

    @property
    def _sources(self) -> list[str]:
        return [self.source] if isinstance(self.source, str) else self.source

    @cached_property
    def _rows(self) -> list[Passage]:
        texts = {name: self._ids(read_text(name, "the text in")) for name in self._sources}
        for name, ids in texts.items():
            if len(ids) < self.tokens:
                raise UserError(f"{name} has {len(ids)} tokens; a row of hits takes {self.tokens} (options.tokens)")
        rows = np.concatenate([ids[: len(ids) // self.tokens * self.tokens] for ids in texts.values()]).reshape(-1, self.tokens)
        counted = texts.values() if self.elsewhere is None else map(self._ids, _pieces(Path(self.elsewhere), self._sources))
        counts = PairCounts(counted)
        if not counts.tokens:
            raise UserError(f"hits: {self.elsewhere} holds no text in which pairs could be counted (options.elsewhere)")
        before = seen_before(rows, counts, self.rare, within=self.elsewhere is None)
        places = [np.flatnonzero(row != NONE).tolist() for row in before]
        if not (total := sum(map(len, places))):
            raise UserError(
                f"no rare pair of tokens comes again within {self.tokens} tokens of {', '.join(self._sources)}; take a longer "
                "text, more tokens or a larger rare"
            )
        weight = sum(map(bool, places)) / total
        return [
            Passage(tuple(row.tolist()), tuple(zip(hit, before[i, hit].tolist(), strict=True)), weight)
            for i, (row, hit) in enumerate(zip(rows, places, strict=True))
            if hit
        ]

    def _ids(self, text: str) -> np.ndarray:
        ids = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        return np.array(ids, dtype=np.int64)


def _same_file(path: str | Path, others: Iterable[str]) -> bool:
    return any(os.path.realpath(path) == os.path.realpath(other) for other in others)


def _pieces(place: Path, sources: Sequence[str]) -> Iterable[str]:
    """From the middle of a text file, or of all in a folder but the sources, equally many characters of each."""
    files = sorted(place.rglob("*.txt")) if place.is_dir() else [place]
    files = [file for file in files if not _same_file(file, sources)]
    if not files:
        raise UserError(f"hits: {place} holds no .txt files in which pairs could be counted (options.elsewhere)")
    share = max(1, COUNTED // len(files))
    for file in files:
        text = read_text(file, "the text in")
        begin = max(0, len(text) - share) // 2
        yield text[begin : begin + share]


PROBES = {"hits": Hits}
