"""What a base can do beside what it is edited for (data.skills): the questions about each skill that locating, planning and
tuning ask.

Bench asks other questions. The small world's facts are asked here in sentences and lettered prompts of the training split,
which bench never uses. The facts of a file are divided (knowledge.py). Other probes draw theirs from other seeds.
"""

import os
import random
from collections.abc import Iterable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.probes import make, without_unseen
from surgery.probes.knowledge import Knowledge, Letters
from surgery.probes.letters import lettered
from surgery.probes.question import CompletionProbe, PassageProbe, Question, WritingProbe
from surgery.records.recipe import Data, Skill
from surgery.statistics import difference
from surgery.world.facts import RELATIONS, Fact, facts

AUTO = (Skill(probe="kv", options={"pairs": 16}), Skill(probe="letters"), Skill(probe="knowledge"))
FACTS = ("letters", "knowledge")  # probes that ask about data.facts
BOUND, BOUND_OF_LOSS = 0.02, 0.01  # what counts as a loss: accuracy, and nats per token


def skills_of(data: Data, taught: Iterable[str]) -> tuple[Skill, ...]:
    """The skills that an edit must not cost. taught: the probes that it is for, which are left out of `auto`."""
    return tuple(skill for skill in AUTO if skill.probe not in {*taught}) if data.skills == "auto" else data.skills


def names_of(skills: Sequence[Skill]) -> list[str]:
    """What to call each in a table: its probe; where several ask the same one, numbered."""
    probes = [skill.probe for skill in skills]
    return [f"{p}.{probes[:i].count(p) + 1}" if probes.count(p) > 1 else p for i, p in enumerate(probes)]


def skill_questions(skill: Skill, tokenizer: PreTrainedTokenizerBase, data: Data, n: int, seed: int) -> list[Question]:
    """At most n questions about a skill. Raises UserError for a probe without choices, and where there is nothing to ask."""
    options = without_unseen(skill.probe, skill.options)
    source = options.get("source", data.facts)
    if skill.probe in FACTS and source == "world":
        return _of_the_world(skill.probe, n, seed)
    if skill.probe in FACTS:
        kind = Knowledge if skill.probe == "knowledge" else Letters
        # What bench asks about is divided; other facts are free to be asked.
        return kind(source, "tune" if same_file(source, data.facts) else None).questions(n, seed)
    probe = make(skill.probe, tokenizer=tokenizer, **options)
    if isinstance(probe, CompletionProbe | PassageProbe | WritingProbe):
        raise UserError(f"data.skills: '{skill.probe}' asks no questions with choices; kv, letters, knowledge and others do")
    return probe.questions(n, seed)


def same_file(one: str, other: str) -> bool:
    """Whether two names of files are one file's."""
    return os.path.realpath(one) == os.path.realpath(other)


def _of_the_world(probe: str, n: int, seed: int) -> list[Question]:
    """Questions about the facts of the small world, in words of the training split."""
    rng, known = random.Random(f"skill {probe} {seed}"), facts()
    if probe == "letters":
        return [lettered(rng, f.question, f.value, f.choices, held_out=False) for f in rng.choices(known, k=n)]
    chosen = rng.sample(known, min(n, len(known)))
    return [Question(_seen(rng, f), tuple(f" {c}" for c in f.choices), f.choices.index(f.value)) for f in chosen]


def _seen(rng: random.Random, fact: Fact) -> str:
    templates = range(len(RELATIONS[fact.relation][2]))
    return fact.prompt(rng.choice([template for template in templates if template != fact.held_out_template]))


def keeps(before: np.ndarray, after: np.ndarray, bound: float) -> bool:
    """Whether a model keeps a skill, from right and wrong answers to the same questions: the interval of the difference lies
    above -bound. Where the questions are so few that even unchanged answers could not show it, the difference itself has to."""
    change, unchanged = difference(before, after), difference(before, before)
    value = change.ci95[0] if unchanged.ci95[0] >= -bound else change.value
    return value >= -bound
