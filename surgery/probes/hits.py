"""Recall hits in running text: tokens that complete a pair which stood before in the context, and is rare elsewhere.

Most of what attention gains over recurrences on natural text sits there (Zoology, arXiv 2312.04927, section 3, which calls them
associative-recall hits). Rare means rare in the training data there; as those of a checkpoint are mostly unknown, here it means
rare in a text of the same kind, outside the row. All tokens of a text are looked at, in those of the model's own tokenizer; the
probe `recall` asks for single words instead, one a question.
"""

from collections.abc import Iterable

import numpy as np

GAP = 8  # tokens between the two occurrences of a pair, at least: a refrain of a few tokens is no recall
BITS = 32  # of a token's number
SECOND = (1 << BITS) - 1  # of a pair's number, these bits are its second token
NONE = -1  # instead of a pair's number or place, where there is no pair


class PairCounts:
    """How often each pair of neighbouring tokens stands in some text. tokens: how many tokens that is."""

    def __init__(self, stretches: Iterable[np.ndarray]):
        """stretches: token ids (t,) of text that runs on within each of them."""
        kept = [np.asarray(ids, dtype=np.int64) for ids in stretches]
        self.tokens = sum(map(len, kept))
        numbers = np.concatenate([_pairs(ids[None])[0] for ids in kept]) if kept else np.empty(0, dtype=np.int64)
        self._numbers, self._counts = np.unique(numbers[numbers != NONE], return_counts=True)

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """How often the pairs with these numbers stand there; an array of the same shape."""
        if not len(self._numbers):
            return np.zeros(numbers.shape, dtype=np.int64)
        places = np.searchsorted(self._numbers, numbers).clip(max=len(self._numbers) - 1)
        return np.where(self._numbers[places] == numbers, self._counts[places], 0)

    def token_counts(self, tokens: int) -> np.ndarray:
        """(tokens,): how often each token stands there as the second of a pair, so anywhere but at a stretch's beginning."""
        return np.bincount(self._numbers & SECOND, self._counts, minlength=tokens).astype(np.int64)


def hits(
    rows: np.ndarray, counts: PairCounts, rare: float, *, within: bool, documents: np.ndarray | None = None, gap: int = GAP
) -> np.ndarray:
    """(rows, t) bool: which tokens of rows (rows, t) of token ids are hits.

    A token is one where the pair that it ends stood in the same row before, last at least `gap` tokens before, and stands
    elsewhere in the text of `counts` at most `rare` times per million tokens. within: whether the rows are part of that text;
    what stands in the row itself then does not count. documents (rows, t): the number of the document that a token belongs to,
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
    """(places,): how often the same number stands in the same row."""
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
