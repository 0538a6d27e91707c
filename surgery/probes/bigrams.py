"""Repeated rare bigrams in running text: tokens that complete a pair which occurred before in the text, and is rare elsewhere.

Most of what attention gains over recurrences on natural text sits there (Zoology, arXiv 2312.04927, section 3, which calls them
associative-recall hits). Rare means rare in the training data there; as those of a checkpoint are mostly unknown, here it means
rare in a text of the same kind, outside the row.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.probes.question import Question
from surgery.runtime.files import read_text

GAP = 8  # tokens between the two occurrences of a pair, at least: a refrain of a few tokens is no recall
BITS = 32  # of a token's number
NONE = -1  # instead of a pair's number or place, where there is no pair
COUNTED = 2**20  # characters of other text in which pairs are counted: some 250,000 tokens
MOST_TOKENS = 2**16  # of a row


class PairCounts:
    """How often each pair of neighbouring tokens occurs in some text. tokens: how many tokens that is."""

    def __init__(self, stretches: Iterable[np.ndarray]):
        """stretches: token ids (t,) of text that runs on within each of them."""
        kept = [np.asarray(ids, dtype=np.int64) for ids in stretches]
        self.tokens = sum(map(len, kept))
        numbers = np.concatenate([_number_pairs(ids[None])[0] for ids in kept]) if kept else np.empty(0, dtype=np.int64)
        self._numbers, self._counts = np.unique(numbers[numbers != NONE], return_counts=True)

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """How often the pairs with these numbers occur there; an array of the same shape."""
        if not len(self._numbers):
            return np.zeros(numbers.shape, dtype=np.int64)
        places = np.searchsorted(self._numbers, numbers).clip(max=len(self._numbers) - 1)
        return np.where(self._numbers[places] == numbers, self._counts[places], 0)


def find_repeats(
    rows: np.ndarray, counts: PairCounts, rare: float, *, within: bool, documents: np.ndarray | None = None, gap: int = GAP
) -> np.ndarray:
    """(rows, t) int: for every token that completes a repeated rare bigram, where in its row the bigram ended before; NONE (-1)
    for all other tokens.

    rows (rows, t): token ids. A bigram is repeated if it stood in the same row before, last at least `gap` tokens before, and
    rare if it stands elsewhere in the text of `counts` at most `rare` times per million tokens. within: whether the rows are
    part of that text; what is in the row itself then does not count. documents (rows, t): the number of the document that a
    token belongs to, where a row holds several; none sees another.
    """
    rows = np.asarray(rows, dtype=np.int64)
    numbers = _number_pairs(rows, documents)
    count, width = rows.shape
    places = np.arange(rows.size)
    contexts = places // width
    if documents is not None:
        begins = np.ones(documents.shape, dtype=bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        contexts = begins.ravel().cumsum()
    # One document of one row is one context. Its number comes first, so that pairs of different contexts are never the same.
    order = np.lexsort((places, numbers.ravel(), contexts))
    number, context, place = numbers.ravel()[order], contexts[order], places[order]
    again = np.zeros(len(order), dtype=bool)
    again[1:] = (number[1:] == number[:-1]) & (context[1:] == context[:-1]) & (number[1:] != NONE)
    far = np.zeros(len(order), dtype=bool)
    far[1:] = place[1:] - place[:-1] >= gap
    elsewhere = counts.of(number)
    if within:
        elsewhere = elsewhere - _count_in_row(place // width, number)
    before = np.full(rows.size, NONE, dtype=np.int64)
    is_repeat = again & far & (elsewhere <= rare * counts.tokens / 1e6)
    before[order] = np.where(is_repeat, np.roll(place, 1) % width, NONE)
    return before.reshape(count, width)


def _number_pairs(rows: np.ndarray, documents: np.ndarray | None = None) -> np.ndarray:
    """(rows, t): the number of the pair that each token ends; NONE where a text begins."""
    numbers = np.full(rows.shape, NONE, dtype=np.int64)
    numbers[:, 1:] = (rows[:, :-1] << BITS) | rows[:, 1:]
    if documents is not None:
        numbers[:, 1:][documents[:, 1:] != documents[:, :-1]] = NONE
    return numbers


def _count_in_row(row: np.ndarray, number: np.ndarray) -> np.ndarray:
    """(places,): how often the same number occurs in the same row."""
    order = np.lexsort((number, row))
    row, number = row[order], number[order]
    begins = np.flatnonzero(np.r_[True, (row[1:] != row[:-1]) | (number[1:] != number[:-1])])
    lengths = np.diff(np.r_[begins, len(order)])
    counts = np.empty(len(order), dtype=np.int64)
    counts[order] = np.repeat(lengths, lengths)
    return counts


@dataclass(frozen=True)
class Bigrams:
    """source: a text file, or a list of them; which heads carry names depends on the names, so that several texts say more than
    one. elsewhere: another text file in which pairs are counted: those that come `rare` times per million tokens there, or
    less, are rare. Without it, they are counted in the other rows of the source, where the names that run through all of it are
    not rare. tokens: of a row, from which a prompt is the part before the token that is asked for.
    """

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    source: str | list[str]
    elsewhere: str | None = None
    tokens: int = 512
    rare: float = 10.0

    def __post_init__(self) -> None:
        if not self.sources or "" in (*self.sources, self.elsewhere):
            raise UserError("bigrams takes a text file, or a list of them (options.source)")
        if self.elsewhere is not None and Path(self.elsewhere).resolve() in {Path(source).resolve() for source in self.sources}:
            raise UserError(
                "bigrams: source and elsewhere are one text; leave elsewhere out, and pairs are counted in its other rows"
            )
        if not 2 * GAP <= self.tokens <= MOST_TOKENS:
            raise UserError(f"bigrams takes rows of {2 * GAP} to {MOST_TOKENS:,} tokens, not {self.tokens}")
        if not 0 <= self.rare < float("inf"):
            raise UserError(f"bigrams takes a finite number of pairs per million tokens of at least 0, not {self.rare}")

    @property
    def sources(self) -> list[str]:
        return [self.source] if isinstance(self.source, str) else self.source

    def questions(self, n: int, seed: int) -> list[Question]:
        """Open questions: the text before the token, and the token. Their evidence is the bigram where it stood before.

        Raises UserError where the text cannot be read, is shorter than a row, or has no repeated rare bigram.
        """
        ids, ranges, texts = [], [], []
        for source in self.sources:
            text = read_text(source)
            found, places = self._tokenize(text)
            if len(found) < self.tokens:
                raise UserError(f"{source} has {len(found)} tokens; a row of bigrams takes {self.tokens} (options.tokens)")
            whole = len(found) // self.tokens * self.tokens
            ids.append(found)
            ranges.append(places[:whole].reshape(-1, self.tokens, 2))
            texts += [text] * len(ranges[-1])
        rows = np.concatenate([each[: len(each) // self.tokens * self.tokens] for each in ids]).reshape(-1, self.tokens)
        if self.elsewhere is not None:
            text = read_text(self.elsewhere)
            middle = max(0, len(text) - COUNTED) // 2
            ids = [self._tokenize(text[middle : middle + COUNTED])[0]]
        before = find_repeats(rows, PairCounts(ids), self.rare, within=self.elsewhere is None)
        repeats = np.argwhere(before != NONE).tolist()
        random.Random(f"bigrams {seed}").shuffle(repeats)
        offsets, asked = np.concatenate(ranges), list[Question]()
        for row, place in repeats:
            if len(asked) == n:
                break
            if question := self._ask(texts[row], offsets[row], rows[row], place, before[row, place]):
                asked.append(question)
        if not asked:
            raise UserError(
                f"no rare pair of tokens comes again within {self.tokens} tokens of {', '.join(self.sources)}; take a longer "
                "text, more tokens or a larger rare"
            )
        return asked

    def _ask(self, text: str, ranges: np.ndarray, row: np.ndarray, place: int, before: int) -> Question | None:
        """None where the text up to the token has other tokens than the row, so that the question would be another one. The
        first does not count: it may be another at the beginning of a text."""
        begin, cut, stop = ranges[0, 0], ranges[place - 1, 1], ranges[place, 1]  # a range may leave out the space before a word
        for end, last in ((stop, place + 1), (cut, place)):
            if not np.array_equal(self._tokenize(text[begin:end])[0][1 - last :], row[1:last]):
                return None
        span = (int(ranges[before - 1, 0] - begin), int(ranges[before, 1] - begin))
        return Question(text[begin:cut], (text[cut:stop],), 0, (span,), 0)

    def _tokenize(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (t,) and their ranges of characters (t, 2)."""
        encoding = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False, return_offsets_mapping=True)
        return np.array(encoding["input_ids"], dtype=np.int64), np.array(encoding["offset_mapping"]).reshape(-1, 2)


PROBE = Bigrams
