"""What probes ask: a question with choices, a text to be completed, answers to be written, or some tokens of running text."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable


@dataclass(frozen=True)
class Question:
    """A prompt, the texts that may follow it, and which of them is right.

    spans: the ranges of characters of the prompt that hold the evidence (for retrieval: one per pair, its newline included, in
    order). evidence: which of them holds the answer. The roles of heads are read from the attention between them.
    """

    prompt: str
    choices: tuple[str, ...]
    answer: int
    spans: tuple[tuple[int, int], ...] = ()
    evidence: int | None = None

    @property
    def chance(self) -> float:
        """How often a guess among the choices is right."""
        return 1 / len(self.choices)


def with_spans(opening: str, lines: Iterable[str]) -> tuple[str, list[tuple[int, int]]]:
    """(an opening and then the lines, the span of characters of each line), as a Question takes them."""
    prompt, spans = opening, []
    for line in lines:
        spans.append((len(prompt), len(prompt) + len(line)))
        prompt += line
    return prompt, spans


@dataclass(frozen=True)
class Completion:
    """A prompt, and the text that has to follow it token for token."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Writing:
    """A prompt, behind which `tokens` tokens are written, and the answers that have to stand among them."""

    prompt: str
    answers: tuple[str, ...]
    tokens: int


@dataclass(frozen=True)
class Passage:
    """A row of running text, some of whose tokens are asked for, each behind all tokens before it.

    ids: of the row's tokens. hits: (place of a token that is asked for, place at which the same pair of tokens ended before).
    weight: of one such token among all that are asked for in the row, so that the loss of rows is, on average, that of tokens.
    Roles of heads are not read from it: it has no spans of evidence.
    """

    spans: ClassVar[tuple[tuple[int, int], ...]] = ()
    evidence: ClassVar[int | None] = None
    ids: tuple[int, ...]
    hits: tuple[tuple[int, int], ...]
    weight: float = field(default=1.0, compare=False)


class Probe(Protocol):
    """What asks questions."""

    def questions(self, n: int, seed: int) -> list[Question]:
        """At most n, the same for the same seed."""


@runtime_checkable
class CompletionProbe(Protocol):
    """What asks for completions."""

    def completions(self, n: int, seed: int) -> list[Completion]:
        """At most n, the same for the same seed."""


@runtime_checkable
class WritingProbe(Protocol):
    """What asks for answers in a text that is written."""

    def writings(self, n: int, seed: int) -> list[Writing]:
        """At most n, the same for the same seed."""


@runtime_checkable
class PassageProbe(Protocol):
    """What asks for tokens of running text."""

    def passages(self, n: int, seed: int) -> list[Passage]:
        """At most n, the same for the same seed."""
