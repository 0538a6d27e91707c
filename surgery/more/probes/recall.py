"""Recall in running text: a rare pair of neighbouring words comes again, and its second word is asked for.

Most of what attention gains over recurrences on natural text sits in such words: Zoology (arXiv 2312.04927, section 3) calls
them associative-recall hits. There they are tokens, and rare is what the training data seldom holds. Here they are words, so
that any tokenizer may be asked; and rare is what the rest of the text seldom holds, as the training data of a checkpoint are
mostly unknown.

The prompt is the text before the word, so the question needs no lesson to be understood. The other candidates are words of the
prompt that are about as frequent in the text, and stand behind another word: a model that merely prefers rare words, or words
that it has read, guesses among them.
"""

import random
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from surgery.errors import UserError
from surgery.probes.question import Question
from surgery.records.record import read_text

GAP = 8  # words between the two occurrences of a pair, at least: a refrain of a few words is no recall


@dataclass(frozen=True)
class Recall:
    """Recall in running text: a rare pair of words occurs again, and its second word is asked for.

    words: of the prompt. source: a text file, read with single spaces for white space. rare: how often, per million words, the
    pair may occur in the source outside the prompt. choices: candidates, with the right one; chance is 1 / choices.
    """

    source: str
    words: int = 256
    rare: float = 10.0
    choices: int = 4

    def __post_init__(self) -> None:
        if self.words < 2 * GAP:
            raise UserError(f"recall takes at least {2 * GAP} words, not {self.words}")
        if not 2 <= self.choices <= self.words // 4:
            raise UserError(f"recall takes 2 to {self.words // 4} choices of {self.words} words, not {self.choices}")
        if not 0 <= self.rare < float("inf"):
            raise UserError(f"recall takes a finite number of pairs per million words of at least 0, not {self.rare}")

    def questions(self, n: int, seed: int) -> list[Question]:
        """Raises UserError where the text cannot be read, or no rare pair comes again in it."""
        text = _text(self.source, Path(self.source).stat().st_mtime_ns if Path(self.source).is_file() else 0)
        hits = text.hits(self.words, self.rare)
        if len(text.words) <= self.words:
            raise UserError(f"{self.source} has {len(text.words)} words; a prompt of recall takes {self.words} (options.words)")
        if not len(hits):
            raise UserError(
                f"no rare pair of words comes again within {self.words} words of {self.source} ({len(text.words)} words); take "
                "a longer text, more words or a larger rare"
            )
        rng = random.Random(f"recall {self.words} {self.rare} {self.choices} {seed}")
        result: list[Question] = []
        for hit in rng.sample(range(len(hits)), len(hits)):
            question = self._question(rng, text, *hits[hit].tolist())
            if question is not None:
                result.append(question)
            if len(result) == n:
                break
        return result

    def _question(self, rng: random.Random, text: "_Text", place: int, before: int) -> Question | None:
        """The word at `place` is asked for, which stood at `before` behind the same word. None where the prompt has too few
        other words for the candidates."""
        first = place - self.words
        context, answer, cue = text.words[first:place], text.words[place], text.words[place - 1]
        follow_cue = {word for after, word in pairwise(context) if after == cue}
        # The last word is no candidate's place: what is read there is asked for already.
        places = {word: i for i, word in enumerate(context[:-1]) if i and word not in follow_cue}
        if len(places) < self.choices - 1:
            return None
        rarities = text.rarity[text.codes[[first + i for i in places.values()]]]
        order = np.argsort(np.abs(rarities - text.rarity[text.codes[place]]), kind="stable")
        near = [list(places)[i] for i in order[: 2 * (self.choices - 1)]]
        others = rng.sample(near, self.choices - 1)
        candidates = sorted([answer, *others], key=lambda _: rng.random())
        ends = np.cumsum([len(word) + 1 for word in context])  # each word with the space behind it
        at = {answer: before - first} | {word: places[word] for word in others}
        spans = []  # each candidate, with the word before it
        for i in (at[word] for word in candidates):
            spans.append((int(ends[i - 1]) - len(context[i - 1]) - 1, int(ends[i]) - 1))
        right = candidates.index(answer)
        return Question(" ".join(context), tuple(f" {word}" for word in candidates), right, tuple(spans), right)


class _Text:
    """The words of a file. codes: each one's number. rarity: minus the logarithm of how often the word of that number occurs in
    the text. pairs: the number of the pair that ends at each word from the second on, and how often that pair occurs there."""

    def __init__(self, words: list[str]):
        self.words = words
        self.codes, frequency = _numbered(np.asarray(words, dtype=object))
        self.rarity = -np.log(frequency)
        self.pairs, self.pair_frequency = _numbered(self.codes[:-1] * len(frequency) + self.codes[1:])

    def hits(self, words: int, rare: float) -> np.ndarray:
        """(hits, 2): places of the words that end a rare pair which stood among the `words` words before, and where it stood
        last."""
        order = np.argsort(self.pairs, kind="stable")
        places = order + 1  # of the second word of each pair, by pair, ascending
        same = self.pairs[order[1:]] == self.pairs[order[:-1]]
        place, before = places[1:][same], places[:-1][same]
        fits = (place - before >= GAP) & (before - 1 >= place - words) & (place >= words)
        place, before = place[fits], before[fits]
        number, beyond = self.pairs[place - 1], len(self.words)
        ordered = self.pairs[order] * beyond + places  # ascending
        last, first = number * beyond + place, number * beyond + place - words + 1
        inside = np.searchsorted(ordered, last, side="right") - np.searchsorted(ordered, first)
        outside = self.pair_frequency[number] - inside
        few = outside <= rare * len(self.words) / 1e6
        hits = np.stack((place[few], before[few]), 1)
        return hits[np.argsort(hits[:, 0])]


def _numbered(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of each value among the distinct ones, and how often each of those occurs."""
    _, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    return numbers, counts


@lru_cache(maxsize=4)  # a lesson asks one question at a time
def _text(source: str, changed: int) -> _Text:
    words = read_text(source, "the text in").split()
    if len(words) < 2:
        raise UserError(f"{source} has {len(words)} words; recall needs a text")
    return _Text(words)


PROBES = {"recall": Recall}
