"""Knowledge: facts that only the weights can know, as sentences to be completed.

Without a file, the facts are those of the toy data. With a file of facts, they are its lines: {"prompt": "The capital of France
is", "answer": "Paris"}. Choices are drawn from the other answers, unless a line has its own: "choices": [" Paris", " Rome"],
with "answer" among them, letter for letter. "question": where multiple choice should ask something else than the prompt.

part: planning and tuning ask other questions than bench. Of a file, a quarter of the facts, by a hash of the prompt, is for
them. Of the toy data all facts are, in the sentences of training; bench asks in sentences that training never shows.
"""

import random
import unicodedata
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pydantic

from surgery.errors import UserError
from surgery.probes.question import Question
from surgery.probes.toy import facts
from surgery.records.recipe import TOY
from surgery.records.record import Record, first_error
from surgery.runtime.files import read_text

Part = Literal["tune", "bench"]
SHARE = 4  # a quarter of the facts is for planning and tuning
DRAWN = 10  # choices of a fact that brings none
CAPITALS = Path(__file__).parent / "capitals.jsonl"


class FactLine(Record):
    """A line of a file of facts."""

    prompt: str = pydantic.Field(pattern=r"\S")
    answer: str = pydantic.Field(pattern=r"\S")
    question: str | None = pydantic.Field(default=None, pattern=r"\S")
    choices: tuple[str, ...] = ()

    @pydantic.model_validator(mode="after")
    def _check(self) -> "FactLine":
        if self.choices and self.answer not in self.choices:
            raise ValueError("the answer is not among the choices, letter for letter")
        if self.choices and not len({choice.strip() for choice in self.choices} - {""}) == len(self.choices) > 1:
            raise ValueError("choices: give two at least, and no two alike")
        return self


def read_facts(source: str, part: Part | None = None) -> list[FactLine]:
    """The facts of a file, or those of one part. Raises UserError, with the line's number, where it holds something else."""
    lines = []
    for number, text in enumerate(read_text(CAPITALS if source == "capitals" else source).split("\n"), 1):
        if text.strip():
            try:
                lines.append(FactLine.model_validate_json(text))
            except pydantic.ValidationError as error:
                raise UserError(f"{source}, line {number} is no fact: {first_error(error)}") from error
    answers = list(dict.fromkeys(line.answer.strip() for line in lines))
    if not lines or (len(answers) < 2 and not all(line.choices for line in lines)):
        raise UserError(f"{source} holds no facts, or a single answer, so that no choices can be drawn from the others")
    for i, line in enumerate(lines):
        if not line.choices:  # they are drawn from the other facts' answers
            rng, own = random.Random(f"choices {line.prompt}"), line.answer.strip()
            others = [answer for answer in answers if answer != own]
            choices = [own, *rng.sample(others, min(len(others), DRAWN - 1))]
            rng.shuffle(choices)
            # A word begins with a blank, unless prompt or answer says how it begins, or the script has none.
            last, lead = line.prompt[-1], line.answer[: len(line.answer) - len(line.answer.lstrip())]
            joined = unicodedata.east_asian_width(last) in "WF" and not unicodedata.name(last, "").startswith("HANGUL")
            blank = "" if last.isspace() else lead or " " * (not joined)
            drawn = {"answer": blank + own, "choices": tuple(blank + choice for choice in choices)}
            lines[i] = line.model_copy(update=drawn)
    if part is None or len(lines) < SHARE:
        return lines
    hashes = [zlib.crc32(line.prompt.encode("utf-8", "surrogatepass")) for line in lines]
    bound = sorted(hashes)[len(lines) // SHARE - 1]
    return [line for line, value in zip(lines, hashes, strict=True) if (value <= bound) == (part == "tune")] or lines


@dataclass(frozen=True)
class Knowledge:
    """source: "toy", "capitals" (58 real ones, for real models), or a JSON-lines file. part: "bench", "tune" (the module says
    what this divides), or None for all facts of a file."""

    source: str = TOY
    part: Part | None = None

    def questions(self, n: int, seed: int) -> list[Question]:
        """At most n; there are no more than there are facts."""
        if self.source != TOY:
            lines = read_facts(self.source, self.part)
            asked = [Question(line.prompt, line.choices, line.choices.index(line.answer)) for line in lines]
        else:
            rng, known = random.Random(f"skill knowledge {seed}"), facts()
            pairs = [(fact, fact.held_out_template) for fact in known]
            if self.part == "tune":
                pairs = [(fact, rng.choice(fact.templates(False))) for fact in rng.sample(known, min(n, len(known)))]
            asked = [Question(f.prompt(t), tuple(f" {c}" for c in f.choices), f.choices.index(f.value)) for f, t in pairs]
        return asked if n >= len(asked) else random.Random(f"knowledge {seed}").sample(asked, n)


PROBE = Knowledge
