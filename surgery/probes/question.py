"""What probes ask."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Question:
    """A prompt, the texts that may follow it, and which of them is right. A single text makes an open question.

    spans: ranges of characters of the prompt, one for each record of evidence, in order; of a dictionary one a pair, with its
    newline. evidence: the span that holds the answer. A gather head condenses a span into its last token, an aggregate head
    picks among these tokens (arXiv 2504.18574).
    """

    prompt: str
    choices: tuple[str, ...]
    answer: int
    spans: tuple[tuple[int, int], ...] = ()
    evidence: int | None = None

    @property
    def chance(self) -> float:
        """How often a guess among the choices is right; 0 of an open question."""
        return 1 / len(self.choices) if len(self.choices) > 1 else 0.0


class Probe(Protocol):
    """A source of questions. Each probe is one file of this folder and is found by listing it (probes/__init__.py)."""

    def questions(self, n: int, seed: int) -> list[Question]:
        """At most n questions, the same ones for the same seed."""


def with_spans(opening: str, lines: Iterable[str]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """(the opening followed by the lines, the span of characters of each line), as a Question takes them."""
    prompt, spans = opening, []
    for line in lines:
        spans.append((len(prompt), len(prompt) + len(line)))
        prompt += line
    return prompt, tuple(spans)
