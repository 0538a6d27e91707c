"""What probes ask: a question with choices, or a text to be completed."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


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


@dataclass(frozen=True)
class Completion:
    """A prompt, and the text that has to follow it token for token."""

    prompt: str
    answer: str


class Probe(Protocol):
    """What asks questions."""

    def questions(self, n: int, seed: int) -> list[Question]:
        """At most n, the same for the same seed."""


@runtime_checkable
class CompletionProbe(Protocol):
    """What asks for completions."""

    def completions(self, n: int, seed: int) -> list[Completion]:
        """At most n, the same for the same seed."""
