"""Knowledge: what only the weights can know, as fact cloze and as lettered multiple choice about the same facts.

Without a file, the facts of the small world (as cloze, each in its held-out template; as letters, in prompts of the held-out
split). With a file, its lines: {"prompt": "The capital of France is", "answer": "Paris"}, questions of any kind. Choices are
drawn from the other answers, unless a line has its own: "choices": [" Paris", " Rome", ...], with "answer" among them, letter
for letter. "question": where the lettered form should ask something else than the prompt.

A file's facts have one prompt each. So they are divided: a quarter, by a hash of the prompt, is asked while planning and
tuning, and bench asks the others (of fewer than four, both ask all). The world's need no division: tuning asks them in
templates that bench never uses.
"""

import random
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from surgery.errors import UserError
from surgery.probes.letters import LETTERS, lettered
from surgery.probes.question import Question
from surgery.records.reading import parse_json_lines
from surgery.records.record import read_text
from surgery.world.facts import facts

Part = Literal["tune", "bench"]
PARTS: tuple[Part, ...] = get_args(Part)
SHARE = 4  # one fact in so many is for planning and tuning
DRAWN = 10  # choices of a fact that brings none
CAPITALS = Path(__file__).parent / "capitals.jsonl"


def _lines(source: str, part: Part | None = None) -> list[dict]:
    text = read_text(CAPITALS if source == "capitals" else source, "the facts in")
    items = []
    for number, item in parse_json_lines(text, source):
        if (why := _wrong_with(item)) is not None:
            raise UserError(f"{source}, line {number}: needs prompt and answer, and the answer among its choices, if any{why}")
        items.append(item)
    if not items:
        raise UserError(f"{source} holds no facts")
    items = _with_choices(items, source)
    return items if part is None or len(items) < SHARE else _of_part(items, part)


def _of_part(items: list[dict], part: Part) -> list[dict]:
    """Those of a part, in order. The quarter with the smallest hashes is for planning and tuning."""
    hashes = [zlib.crc32(item["prompt"].encode("utf-8", "surrogatepass")) for item in items]
    bound = sorted(hashes)[len(items) // SHARE - 1]
    return [item for item, value in zip(items, hashes, strict=True) if (value <= bound) == (part == "tune")] or items


def _with_choices(items: list[dict], source: str) -> list[dict]:
    """Each with choices: where a line has none, its answer and others of the file, in an order that its prompt decides."""
    answers = list(dict.fromkeys(item["answer"].strip() for item in items))
    if len(answers) < 2 and any("choices" not in item for item in items):
        raise UserError(f"{source}: choices are drawn from the other answers, and there is only '{answers[0]}'")
    return [item if "choices" in item else _drawn(item, answers) for item in items]


def _drawn(item: dict, answers: list[str]) -> dict:
    rng, own = random.Random(f"choices {item['prompt']}"), item["answer"].strip()
    others = [answer for answer in answers if answer != own]
    choices = [own, *rng.sample(others, min(len(others), DRAWN - 1))]
    rng.shuffle(choices)
    # A word begins with a blank, unless prompt or answer says how it begins.
    blank = "" if item["prompt"][-1].isspace() else item["answer"][: len(item["answer"]) - len(item["answer"].lstrip())] or " "
    return item | {"answer": blank + own, "choices": [blank + choice for choice in choices]}


def _wrong_with(item: Any) -> str | None:
    """What is wrong with a line of a file of facts, as the end of a sentence; None if nothing is."""
    if not isinstance(item, dict) or not {"prompt", "answer"} <= item.keys():
        return ""  # the sentence says it all
    if "choices" not in item:
        texts = [item["prompt"], item["answer"], item.get("question", "-")]
        return None if all(isinstance(text, str) and text.strip() for text in texts) else "; each of them is text"
    choices = item["choices"]
    texts = [item["prompt"], item["answer"], item.get("question", "-"), *(choices if isinstance(choices, list) else ())]
    if not isinstance(choices, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        return "; each of them is text, and choices is a list of texts"
    if item["answer"] not in choices:
        return "; the answer is not"
    return (
        None if len({choice.strip() for choice in choices}) == len(choices) > 1 else "; two choices at least, and no two alike"
    )


@dataclass(frozen=True)
class Knowledge:
    """Facts as sentences to be completed, which only the weights can know.

    source: "world", "capitals" (58 real ones, for real models), or a JSON-lines file. part: "tune" for the facts of a file
    that planning and tuning ask, "bench" for the others; by default all."""

    source: str = "world"
    part: Part | None = None

    def questions(self, n: int, seed: int) -> list[Question]:
        """At most n; there are no more than there are facts."""
        rng = random.Random(f"knowledge {seed}")
        if self.source == "world":
            questions = [
                Question(f.prompt(f.held_out_template), tuple(f" {c}" for c in f.choices), f.choices.index(f.value))
                for f in facts()
            ]
        else:
            questions = [
                Question(i["prompt"], tuple(i["choices"]), i["choices"].index(i["answer"]))
                for i in _lines(self.source, self.part)
            ]
        return questions if n >= len(questions) else rng.sample(questions, n)


@dataclass(frozen=True)
class Letters:
    """The same facts as questions with lettered options: the letter has to be retrieved.

    source, part: as for `knowledge`."""

    source: str = "world"
    part: Part | None = None

    def questions(self, n: int, seed: int) -> list[Question]:
        rng = random.Random(f"letters {seed}")
        if self.source == "world":
            pool = [(f.question, f.value, f.choices) for f in facts()]
        else:
            pool = [
                (i.get("question", i["prompt"]), i["answer"].strip(), tuple(c.strip() for c in i["choices"]))
                for i in _lines(self.source, self.part)
                if len(i["choices"]) >= len(LETTERS)
            ]
            if not pool:
                raise UserError(f"{self.source}: lettered questions need at least {len(LETTERS)} choices a fact")
        held_out = True if self.source == "world" else None
        return [lettered(rng, *rng.choice(pool), held_out=held_out) for _ in range(n)]


PROBES = {"knowledge": Knowledge, "letters": Letters}
