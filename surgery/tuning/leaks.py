"""Leaks: how much of the text that is measured on is also in the text that is trained on, perhaps under another name, in
another format or with other line ends.

Only letters and digits are compared, in lower case, so that line ends, wrapping, spaces, punctuation and JSON's quotes do not
matter. Stretches of `WINDOW` letters, at places spread evenly over the measured text, are looked for everywhere in the training
text by a rolling hash. A hundred megabytes take seconds, and memory does not grow with the training text.
"""

from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np

from surgery.errors import UserError
from surgery.records.record import read_text
from surgery.runtime.progress import say

WINDOW = 64  # letters: about 13 words, as contamination of benchmarks is usually measured
TOLERATED = 0.05  # licences, headings and quotations; two novels by different authors share .00001
WORTH_SAYING = 0.005
LIMIT = 2**28  # of a source, at most this many characters are read
PER_TOKEN = 8  # characters, more than there are in running text

PLACES = 2**16  # of the measured text, at most; and a sixteenth of that in the part that perplexity reads
CHUNK = 2**18  # letters that are hashed at once
FILTER = 22  # leading bits of a hash, by which nearly all places are ruled out at once
OTHERS = bytes(i for i in range(128) if not chr(i).isalnum())  # no letters; everything beyond ASCII counts as a letter
LOWER = bytes(range(256)).lower()

_random = np.random.default_rng(0)
_VALUES = _random.integers(0, 2**64, 256, np.uint64)  # one for every letter
_BASE = int(_random.integers(0, 2**64, dtype=np.uint64)) | 1


def check_apart(held_out: str, sources: Iterable[tuple[str, Iterable[str]]], measured: int) -> None:
    """Raise UserError if more than `TOLERATED` of the text file `held_out` is in one of the sources.

    sources: (name, texts) of each; the first `LIMIT` characters of its texts are read. measured: about how many tokens from the
    beginning of the file perplexity reads; that part is also compared by itself.
    """
    sought: CheckedText | None = None
    for name, texts in sources:
        sought = sought or CheckedText(read_text(held_out, "the text in"), PER_TOKEN * measured)
        share = sought.share(_limited(name, texts))
        overlap = f"{100 * share:.1f}% of {held_out} is also in {name}"
        if share > TOLERATED:
            raise UserError(f"{overlap}; data.held_out_text must not be text that is trained on")
        if share > WORTH_SAYING:
            say(f"{overlap}; up to {100 * TOLERATED:.0f}% is accepted")


class CheckedText:
    """A text that is looked for in others. measured: the share of its first `measured` characters is also taken by itself."""

    def __init__(self, text: str, measured: int = 0):
        places = max(0, _length(text) - WINDOW + 1)
        first = min(places, _length(text[:measured]))
        chosen = np.union1d(_spread(places, PLACES), _spread(first, PLACES // 16))
        self._first = int(np.searchsorted(chosen, first))
        hashes = np.concatenate([np.empty(0, np.uint64), *_chosen(_hashes([text]), chosen)])
        self._hashes, self._which = np.unique(hashes, return_inverse=True)
        self._filter = np.zeros(2**FILTER, bool)
        self._filter[_head(self._hashes)] = True

    def share(self, texts: Iterable[str]) -> float:
        """The share of this text, from 0 to 1, that is in other texts. These are joined, so it does not matter how they are
        divided."""
        if not len(self._hashes):
            return 0.0
        seen = np.zeros(len(self._hashes), bool)
        for hashes in _hashes(texts):
            likely = hashes[self._filter[_head(hashes)]]
            place = np.minimum(np.searchsorted(self._hashes, likely), len(self._hashes) - 1)
            seen[place[self._hashes[place] == likely]] = True
        hits = seen[self._which]
        return float(max(part.mean() for part in (hits, hits[: self._first]) if len(part)))


def _limited(name: str, texts: Iterable[str]) -> Iterator[str]:
    left = LIMIT
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            say(f"{name}: only the first {LIMIT:,} characters are compared with the held-out text")
            return


def _letters(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass").translate(LOWER, OTHERS)


def _length(text: str) -> int:
    """The number of letters of a text."""
    return sum(len(_letters(text[start : start + CHUNK])) for start in range(0, len(text), CHUNK))


def _spread(n: int, most: int) -> np.ndarray:
    """At most `most` numbers of range(n), evenly spaced."""
    return np.unique(np.linspace(0, max(0, n - 1), min(n, most)).astype(np.int64))


def _chosen(parts: Iterable[np.ndarray], places: np.ndarray) -> Iterator[np.ndarray]:
    """The elements at these places of the joined parts."""
    start = 0
    for part in parts:
        yield part[places[(places >= start) & (places < start + len(part))] - start]
        start += len(part)


def _head(hashes: np.ndarray) -> np.ndarray:
    return hashes >> np.uint64(64 - FILTER)


def _hashes(texts: Iterable[str]) -> Iterator[np.ndarray]:
    """The hashes of all windows of the texts' letters, in order, in parts."""
    held = bytearray()
    for text in texts:
        for start in range(0, len(text), CHUNK):
            held += _letters(text[start : start + CHUNK])
            while len(held) >= CHUNK:
                yield _rolled(bytes(held[:CHUNK]))
                del held[: CHUNK - WINDOW + 1]
    if len(held) >= WINDOW:
        yield _rolled(bytes(held))


def _rolled(letters: bytes) -> np.ndarray:
    """The hash of every window: the sum over its letters of value * base^place modulo 2^64, places counted from its first."""
    powers, inverses = _powers()
    sums = np.zeros(len(letters) + 1, np.uint64)
    np.cumsum(_VALUES[np.frombuffer(letters, np.uint8)] * powers[: len(letters)], out=sums[1:])
    return (sums[WINDOW:] - sums[:-WINDOW]) * inverses[: len(sums) - WINDOW]


@cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """The powers of the base, and of its inverse modulo 2^64, which every odd number has."""
    both = []
    for base in (_BASE, pow(_BASE, -1, 2**64)):
        factors = np.full(CHUNK, base, np.uint64)
        factors[0] = 1
        both.append(np.cumprod(factors, dtype=np.uint64))
    return both[0], both[1]
