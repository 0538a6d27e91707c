"""A needle in a haystack: a number told somewhere in a long text is asked for at its end.

The haystack is running text, cut so that the whole prompt, special tokens included, has exactly `length` tokens. The needle,
"The secret number of anchor is 42.", follows the sentence that ends nearest to `depth`. The model's answer is the number,
among the needle's and nine others from 10 to 99, whose tokens have the largest summed log-probability. Chance is 1 / 10. The
nine stand in no needle: a model that merely prefers the numbers it has read is above chance.

Several needles are key-value pairs with text between them. They stand evenly spread, and their numbers are among the
candidates. Where several are asked for, one after the other, the earlier questions stand with their right answers.
"""

import random
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.models.tokens import encode_prompts
from surgery.probes.question import Question
from surgery.probes.toy import Keys, document, key_words
from surgery.records.recipe import TOY
from surgery.runtime.files import read_text

CHOICES = 10  # at least: where there are more needles, as many
MOST = 32  # needles
NUMBERS = range(10, 100)
SPARE = 64  # words beyond the cut, from which the haystack's last ones are chosen
BACK = 24  # words before the cut that may be replaced by others; with 8, one prompt in a thousand was a token short


@dataclass(frozen=True)
class Unfilled:
    """A question without its haystack. words: more than fit. needles: the sentences to be hidden. asked: the end of the prompt.
    answer: which of the choices; last: which of the needles is asked for."""

    words: list[str]
    needles: tuple[str, ...]
    asked: str
    choices: tuple[str, ...]
    answer: int
    last: int


@dataclass(frozen=True)
class Needle:
    """length: tokens of the prompt, by `tokenizer`. depth: where the needle is in the haystack (0: before it, 1: after it).
    source: "toy" (held-out documents of the toy data), "toy-training" (its other documents) or a text file, from which random
    stretches are read, with single spaces for white space. keys: which words may name the number, as for kv. needles: how many
    there are, at most 32; several are evenly spread, whatever the depth. queries: how many of them are asked for; the last one
    is the question, the earlier ones have their answers."""

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    length: int
    depth: float = 0.5
    source: str = TOY
    keys: Keys = "all"
    needles: int = 1
    queries: int = 1

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UserError(f"needle takes a length of at least 1 token, not {self.length}")
        if not 0 <= self.depth <= 1:
            raise UserError(f"needle takes a depth from 0 to 1, not {self.depth}")
        if not 1 <= self.needles <= MOST:
            raise UserError(f"needle takes 1 to {MOST} needles, not {self.needles}")
        if not 1 <= self.queries <= self.needles:
            raise UserError(f"{self.needles} needles take 1 to {self.needles} queries, not {self.queries}")

    def questions(self, n: int, seed: int) -> list[Question]:
        """Raises UserError where the text cannot be read, or is too short for the length, or the length for the question."""
        rng = random.Random(f"needle {self.length} {self.depth} {seed}")
        text = [] if self.source in (TOY, "toy-training") else read_text(self.source).split()
        questions = []
        for unfilled in [self._draw(rng, text) for _ in range(n)]:
            prompt = self._prompt(unfilled, self._fit_words(unfilled))
            spans = tuple((begin := prompt.index(needle), begin + len(needle)) for needle in unfilled.needles)
            questions.append(Question(prompt, unfilled.choices, unfilled.answer, spans, unfilled.last))
        return questions

    def _draw(self, rng: random.Random, text: list[str]) -> Unfilled:
        count = self.length + SPARE  # more words than can fit, as a word has at least one token
        words: list[str] = []
        if self.source in (TOY, "toy-training"):
            while len(words) < count:
                words += document(rng, held_out=self.source == TOY).split()
        else:
            start = rng.randrange(max(1, len(text) - count + 1))
            words = text[start : start + count]
        named = key_words(self.keys, self.needles)
        keys = [rng.choice(named)] if self.needles == 1 else rng.sample(named, self.needles)
        numbers = rng.sample(NUMBERS, max(CHOICES, self.needles))
        told = [rng.randrange(CHOICES)] if self.needles == 1 else rng.sample(range(len(numbers)), self.needles)
        questions = [f"The secret number of {key} is" for key in keys]
        needles = tuple(f"{question} {numbers[place]}." for question, place in zip(questions, told, strict=True))
        *before, last = [0] if self.needles == 1 else rng.sample(range(self.needles), self.queries)
        asked = "".join(f"\n{needles[i]}" for i in before) + f"\n{questions[last]}"
        return Unfilled(words, needles, asked, tuple(f" {number}" for number in numbers), told[last], last)

    def _prompt(self, unfilled: Unfilled, words: list[str]) -> str:
        """The prompt with `words` as the haystack: each needle stands behind a whole number of sentences."""
        ends = [0, *(i for i, word in enumerate(words, 1) if word.endswith((".", "!", "?"))), len(words)]
        parts, place = list[str](), 0
        for i, needle in enumerate(unfilled.needles):
            depth = self.depth if self.needles == 1 else (i + 0.5) / self.needles
            end = min(ends, key=lambda end: abs(end - depth * len(words)))
            parts += [*words[place:end], needle]
            place = end
        return " ".join([*parts, *words[place:]]) + unfilled.asked

    def _fit_words(self, unfilled: Unfilled) -> list[str]:
        """The haystack's first words, as many as fit, and then some of the following ones, chosen to fill the rest exactly.

        If some tokens cannot be filled, the prompt is that much shorter.
        """

        def tokens(words: list[str]) -> int:
            return len(encode_prompts(self.tokenizer, [self._prompt(unfilled, words)])[0])

        words = unfilled.words
        least, most = tokens([]), tokens(words)
        if least > self.length:
            raise UserError(f"needle: length={self.length} is too short: the question alone has {least} tokens")
        if most < self.length:
            raise UserError(f"{self.source} has {most - least} tokens; a needle of {self.length} needs more")
        fit, beyond = 0, len(words) + 1
        while beyond - fit > 1:  # by interpolation, because counting the tokens of a long text is what takes the time
            share = (self.length - least) / max(most - least, 1)
            middle = fit + min(max(int(share * (beyond - fit)), 1), beyond - fit - 1)
            if (count := tokens(words[:middle])) <= self.length:
                fit, least = middle, count
            else:
                beyond, most = middle, count
        best, fewest = words[:fit], self.length - least
        for first in range(fit, max(0, fit - BACK) - 1, -1):
            chosen, missing = words[:first], self.length - tokens(words[:first])
            for word in words[first + 1 : first + SPARE]:
                if missing <= 0:
                    break
                if (left := self.length - tokens([*chosen, word])) >= 0:
                    chosen, missing = [*chosen, word], left
            if 0 <= missing < fewest:
                best, fewest = chosen, missing
            if fewest == 0:
                break
        return best


PROBE = Needle
