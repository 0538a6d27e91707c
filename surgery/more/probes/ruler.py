"""RULER: what is the real context size of a long-context model? (arXiv 2404.06654), without a download.

Prompts, answers and scores are those of lm-evaluation-harness 0.4.13 (its group `ruler`), example for example, if `words` is
"wonderwords": everything is drawn in the same order (tools/ruler_check.py compares). Its texts are data, and are carried over
as they are. What differs:

- By default the words are pairs of this project's own words, and sentences of running text end where a word ends with a full
  stop, an exclamation or a question mark, since wonderwords and nltk are not among what it needs.
- Running text is the user's, not essays from the Hub.
- Below 4,096 tokens, where the harness scores nothing, running text grows by 25 words, not by 500, so that it fills a prompt.

A score is the share of the answers that stand in what greedy decoding writes, whatever their case. Guessing gives 0.
"""

import random
import string
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import chain, pairwise, permutations
from typing import Literal

import numpy as np
from scipy.special import zeta
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.probes.needle import WORLDS
from surgery.probes.question import Writing
from surgery.records.record import read_text
from surgery.world.text import document
from surgery.world.words import KEYS

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the {kind} "
    "afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided text? The special magic "
    "{kind} for {query} mentioned in the provided text is"
)
SEVERAL = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided text? The "
    "special magic {kind} for {query} mentioned in the provided text are"
)
CHAINS = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find all "
    "variables that are assigned the value {value} in the text above."
)
CHAINED = (  # with its misspelling
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assgined the value "
    "{value}, they are:"
)
COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most "
    "often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
COMMONEST = "Answer: The top 10 words that appear most often in the list are:"
FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded "
    "words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
    "frequently appeared words in the above coded text?"
)
MOST_FREQUENT = " Answer: According to the coded text above, the three most frequently appeared words are:"
DEPTHS = np.round(np.linspace(0, 100, num=40)).astype(int).tolist()  # percent of a text at which a needle may stand
FIXED = 42  # the seed of what is shuffled in the same way for all examples
LONG = 4096  # tokens, from which on lists and texts grow in larger steps
EXAMPLE = 500  # tokens of the solved example of variable tracking
MOST_HOPS = 10

Kind = Literal["numbers", "words", "uuids"]
Text = Literal["repeat", "needle", "essay"]
Sample = tuple[str, tuple[str, ...]]  # a prompt and its answers


@dataclass(frozen=True)
class Magic:
    """A task of needles: where they are hidden, what their keys and values are, and how many keys there are, values of each,
    and keys that are asked for."""

    text: Text
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


MAGIC = {
    "niah_single_1": Magic("repeat"),
    "niah_single_2": Magic("essay"),
    "niah_single_3": Magic("essay", value="uuids"),
    "niah_multikey_1": Magic("essay", keys=4),
    "niah_multikey_2": Magic("needle"),
    "niah_multikey_3": Magic("needle", key="uuids", value="uuids"),
    "niah_multivalue": Magic("essay", values=4),
    "niah_multiquery": Magic("essay", keys=4, queries=4),
}
# Tokens that are written.
WRITTEN = {**dict.fromkeys(MAGIC, 128), "ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50}
RulerTask = Literal[
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "ruler_vt", "ruler_cwe", "ruler_fwe",
]  # fmt: skip


@dataclass(frozen=True)
class Ruler:
    """RULER: needles, chains of variables and frequent words in long prompts, and the answers have to be written.

    task: one of lm-evaluation-harness' names, niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue, niah_multiquery,
    ruler_vt (variable tracking), ruler_cwe and ruler_fwe (common and frequent words). length: tokens of the prompt and what is
    written after it, at most, by `tokenizer` (of ruler_fwe of the prompt alone). source: the running text in which some needles
    are hidden, as for `needle`. hops: of ruler_vt, how often the value is handed on, 1 to 10. words: "own", or "wonderwords",
    which has to be installed, and for running text nltk with its data punkt_tab.
    """

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    task: RulerTask
    length: int
    source: str = "world"
    hops: int = 4
    words: Literal["own", "wonderwords"] = "own"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UserError(f"ruler takes a length of at least 1 token, not {self.length}")
        if not 1 <= self.hops <= MOST_HOPS:
            raise UserError(f"ruler takes 1 to {MOST_HOPS} hops, not {self.hops}")
        if self.words == "wonderwords" and find_spec("wonderwords") is None:
            raise UserError("ruler with words 'wonderwords' needs that package: pip install wonderwords")

    def writings(self, n: int, seed: int) -> list[Writing]:
        """None where not even the shortest prompt of the task fits. Raises UserError where the text cannot be read or is too
        short."""
        made = {"ruler_vt": self._tracking, "ruler_cwe": self._common, "ruler_fwe": self._frequent}.get(self.task, self._magic)
        samples = made(random.Random(self.name(seed)), n, seed)
        return [Writing(prompt, answers, WRITTEN[self.task]) for prompt, answers in samples]

    def check(self, seed: int) -> None:
        """Raise what `writings` raises."""
        if "essay" in str(MAGIC.get(self.task)) and self.source not in WORLDS:
            self.writings(1, seed)

    def name(self, seed: int) -> str:
        """What the draws of a seed start from."""
        return f"{self.task} {self.length} {seed}"

    def _tokens(self, text: str) -> int:
        return len(self.tokenizer(text, verbose=False)["input_ids"])

    def _fits(self, text: str) -> bool:
        """Whether a prompt leaves room for what is written."""
        return self._tokens(text) + WRITTEN[self.task] <= self.length

    def _size(self, step: int, least: int, most: int | None, tokens: Callable[[int], int]) -> int:
        """The largest size, in steps, at which a prompt with its answers fits; one step less than the first where it does not.
        most: as large as it can be."""
        size, total, room = max(step, least), 0, self.length - WRITTEN[self.task]
        while total < room:
            total = tokens(size)
            if total > room:
                return size - step
            size += step
            if most is not None and size > most:
                return most
        return size

    def _samples(
        self, n: int, size: int, step: int, least: int, draw: Callable[[int], Sample], question: Callable[[str], str] = str
    ) -> Iterator[Sample]:
        """n samples, each of which fits; one is drawn again, smaller, as often as it has to be. question: what of a prompt is
        counted."""
        for _ in range(n):
            for now in range(size, least - 1, -step):
                prompt, answers = draw(now)
                if self._fits(question(prompt)):
                    yield prompt, answers
                    break

    def _magic(self, rng: random.Random, n: int, seed: int) -> Iterator[Sample]:
        task = MAGIC[self.task]
        text = self._words_of_text(seed) if task.text == "essay" else []
        step = (25 if self.length < LONG else 500) if text else (5 if self.length < LONG else 25)
        needles = task.keys * task.values

        def asked(prompt: str) -> str:
            """Up to the question mark: without what the answer begins with."""
            return prompt[: prompt.rindex("?") + 1]

        def counted(size: int) -> int:
            prompt, answers = self._needles(rng, task, size, text)
            return self._tokens(asked(prompt) + " ".join(answers))

        size = self._size(step, needles, len(text) if text else None, counted)
        if text and size >= len(text) and self.source not in WORLDS:
            raise UserError(f"{self.source} has {len(text):,} words; {self.task} of {self.length:,} tokens needs more")

        def draw(now: int) -> Sample:
            return self._needles(rng, task, now, text)

        yield from self._samples(n, max(size, needles), step, needles, draw, asked)

    def _words_of_text(self, seed: int) -> list[str]:
        if self.source not in WORLDS:
            return read_text(self.source, "the text in").split()
        rng, words = random.Random(f"ruler {seed}"), list[str]()
        while len(words) < self.length + LONG:  # more than fit: a word has at least one token
            words += document(rng, held_out=WORLDS[self.source]).split()
        return words

    def _needles(self, rng: random.Random, task: Magic, size: int, text: list[str]) -> Sample:
        keys, values, needles = list[str](), list[list[str]](), list[str]()
        for _ in range(task.keys):
            keys.append(self._drawn(rng, task.key))
            values.append([])
            for _ in range(task.values):
                values[-1].append(self._drawn(rng, task.value))
                needles.append(NEEDLE.format(kind=task.value, key=keys[-1], value=values[-1][-1]))
        random.Random(FIXED).shuffle(needles)
        if task.text == "essay":
            sentences = (_sentences if self.words == "own" else _by_nltk)(text[:size])
            places = sorted(int(len(sentences) * (depth / 100)) for depth in rng.sample(DEPTHS, len(needles)))
            parts = [" ".join(sentences[a:b]) for a, b in pairwise([0, *places, len(sentences)])]
            context = " ".join(chain(*zip(parts, needles, strict=False), parts[-1:]))
        else:
            lines = [NOISE] * size if task.text == "repeat" else [self._hay(rng, task) for _ in range(size)]
            for place, needle in zip(sorted(rng.sample(range(size), len(needles)), reverse=True), needles, strict=True):
                lines.insert(place, needle)
            context = "\n".join(lines)
        chosen = rng.sample(range(task.keys), task.queries)
        *before, last = (keys[i] for i in chosen)
        query = ", ".join(before) + ", and " + last if before else last
        one = task.queries * task.values == 1
        kind, form = (task.value[:-1], ONE) if one else (task.value, SEVERAL)
        return form.format(kind=kind, context=context, query=query), tuple(value for i in chosen for value in values[i])

    def _hay(self, rng: random.Random, task: Magic) -> str:
        key = self._drawn(rng, task.key)
        return NEEDLE.format(kind=task.value, key=key, value=self._drawn(rng, task.value))

    def _drawn(self, rng: random.Random, kind: Kind) -> str:
        if kind == "numbers":
            return str(rng.randint(10**6, 10**7 - 1))
        return rng.choice(_compounds(self.words)) if kind == "words" else str(uuid.UUID(int=rng.getrandbits(128), version=4))

    def _tracking(self, rng: random.Random, n: int, seed: int) -> Iterator[Sample]:
        numbers = np.random.RandomState(seed % 2**32)
        small = Ruler(self.tokenizer, self.task, EXAMPLE, hops=self.hops)

        def counted(size: int, letters: int, before: int = 0) -> int:
            prompt, answers = self._chain(rng, numbers, size, letters)
            return self._tokens(f"{prompt}  {list(answers)}") + before

        # The solved example before each question.
        size = max(5, small._size(5, 0, None, lambda size: counted(size, 3)))
        drawn = small._samples(1, size, 5, 5, lambda now: self._chain(rng, numbers, now, 3), lambda prompt: f"{prompt} ")
        prompt, answers = next(drawn, None) or self._chain(rng, numbers, 5, 3)
        example = f"{prompt}  {' '.join(answers)}\n\n"
        before = self._tokens(example)
        size = self._size(10, 0, None, lambda size: counted(size, 5, before))

        def draw(now: int) -> Sample:
            return self._chain(rng, numbers, now, 5)

        fitting = Ruler(self.tokenizer, self.task, self.length - before, hops=self.hops) if before < self.length else None
        if fitting is None or size < 10:
            return
        for prompt, answers in fitting._samples(n, size, 10, 10, draw, lambda prompt: f"{prompt} "):
            yield f"{_renamed(rng, example)}\n\n{prompt}", answers

    def _chain(self, rng: random.Random, numbers: np.random.RandomState, size: int, letters: int) -> Sample:
        """One chain of variables among so many lines of noise."""

        def drawn() -> str:
            return "".join(rng.choices(string.ascii_uppercase, k=letters))

        names = [drawn() for _ in range(self.hops + 1)]
        while len(names := [*dict.fromkeys(names)]) < self.hops + 1:
            names.append(drawn())
        value = numbers.randint(10000, 99999)
        told = [f"VAR {names[0]} = {value}", *(f"VAR {name} = VAR {before} " for before, name in pairwise(names))]
        lines = [f"{NOISE}\n"] * size
        if len(lines) <= len(told):  # between its sentences then
            lines = [part + "." if part.strip() else part for line in lines for part in line.split(".")]
        for i, place in enumerate(sorted(rng.sample(range(len(lines)), len(told)))):
            lines.insert(place + i, told[i])
        context = " ".join(lines).replace(". \n", ".\n")
        return (CHAINS + CHAINED).format(context=context, value=value, count=self.hops + 1), tuple(names)

    def _common(self, rng: random.Random, n: int, seed: int) -> Iterator[Sample]:
        fixed, words = random.Random(FIXED), [*_single(self.words)]
        fixed.shuffle(words)
        short = self.length < LONG

        def listed(count: int, often: int, seldom: int) -> tuple[str, list[str]]:
            chosen = rng.sample(words, count)
            common = chosen[:10]
            every = common * often + chosen[10:] * seldom
            fixed.shuffle(every)
            return _numbered(every), common

        def draw(count: int) -> tuple[str, str, list[str]]:
            """A solved example, which counts as if it were shown, the question, and its answers."""
            shown, solved = listed(*((20, 3, 1) if short else (40, 10, 3)))
            context, answers = listed(count, *((6, 1) if short else (30, 3)))
            example = f"{COMMON.format(context=shown)} {COMMONEST}{_numbered(solved)}"
            return example, COMMON.format(context=context), answers

        def counted(count: int) -> int:
            example, question, answers = draw(count)
            return self._tokens(f"{example}\n{question} {COMMONEST} {_numbered(answers)}")

        size = self._size(10, 0, len(words), counted)
        if size < 10:
            return

        def sample(count: int) -> Sample:
            _, question, answers = draw(count)
            return f"{question}\n\n{COMMONEST}", tuple(answers)

        yield from self._samples(n, size, 10, 10, sample, lambda prompt: prompt.replace("?\n\n", "? "))

    def _frequent(self, rng: random.Random, n: int, seed: int) -> Iterator[Sample]:
        count, step = self.length // 50, max(1, self.length // 32)
        if count < 4:
            return

        def vocabulary() -> list[str]:
            words = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(count)]
            while len({*words}) < count:
                words.append("".join(rng.choices(string.ascii_lowercase, k=6)))
            words = sorted({*words})
            random.Random(FIXED).shuffle(words)
            return ["...", *words[1:]]  # what is most frequent counts as noise

        def prompt(words: list[str], size: int) -> str:
            counts = (size * np.arange(1, count + 1) ** -2.0 / zeta(2.0)).astype(int)
            text = [word for word, times in zip(words, counts, strict=True) for _ in range(times)]
            random.Random(FIXED).shuffle(text)
            return FREQUENT.format(context=" ".join(text)) + MOST_FREQUENT

        size, words = self.length // 6, vocabulary()
        while self._tokens(prompt(words, size)) < self.length:
            size += step
        size -= step
        for _ in range(n):
            words, now = vocabulary(), size
            while now > 0 and self._tokens(prompt(words, now)) > self.length:
                now -= step
            if now > 0:
                yield prompt(words, now), tuple(words[1:4])


def _sentences(words: list[str]) -> list[str]:
    """Words as sentences."""
    ends = [i for i, word in enumerate(words, 1) if word.endswith((".", "!", "?"))]
    return [" ".join(words[a:b]) for a, b in pairwise(dict.fromkeys([0, *ends, len(words)]))]


def _by_nltk(words: list[str]) -> list[str]:
    """The same as the harness has them. Raises UserError where nltk or its data is missing."""
    try:
        from nltk import sent_tokenize

        return sent_tokenize(" ".join(words))
    except (ImportError, LookupError) as error:
        raise UserError(
            "ruler with words 'wonderwords' divides running text by nltk: pip install nltk, then python -m nltk.downloader "
            "punkt_tab"
        ) from error


def _renamed(rng: random.Random, example: str) -> str:
    """A solved example of variable tracking with other names."""
    mark = CHAINED[-10:]  # behind it stand the answers
    for name in example[example.index(mark) + len(mark) :].split():
        example = example.replace(name, "".join(rng.choices(string.ascii_uppercase, k=len(name))))
    return example


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


@cache
def _compounds(words: str) -> list[str]:
    """Words with a hyphen, the keys of needles."""
    if words == "own":
        return [f"{one}-{other}" for one, other in permutations(KEYS, 2)]
    categories = _categories()
    return sorted({f"{one}-{other}" for one in categories["adjective"] for other in categories["noun"]})


@cache
def _single(words: str) -> list[str]:
    """Words of a list."""
    if words == "own":  # of which there are too few without a hyphen
        return _compounds(words)
    categories = _categories()
    return sorted({word for kind in ("noun", "adjective", "verb") for word in categories[kind]})


def _categories() -> dict[str, list[str]]:
    from wonderwords import RandomWord

    return RandomWord()._categories


PROBES = {"ruler": Ruler}
