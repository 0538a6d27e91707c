"""The batches by which tuning holds a model to its base's other skills: questions with their answers (probes/skills.py)."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import PreTrainedTokenizerBase

from surgery.probes.skills import skill_questions, skills_of
from surgery.records.recipe import Data, Skill, Tune
from surgery.tuning.sequences import IGNORE, Piece, collate, question_pieces


class SkillPrompts(Dataset[list[Piece]]):
    """The sequences of `steps` batches: questions with their right answers. The skills take turns."""

    def __init__(self, skills: Sequence[Skill], tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, seed: int):
        self.skills, self.tokenizer, self.options, self.data, self.seed = skills, tokenizer, options, data, seed

    def __len__(self) -> int:
        return self.options.most_steps * self.options.skill_batch_size

    def __getitem__(self, index: int) -> list[Piece]:
        skill = self.skills[index % len(self.skills)]
        seed = random.Random(f"skill {self.seed} {index}").getrandbits(62)
        (question,) = skill_questions(skill, self.tokenizer, self.data, 1, seed)
        return question_pieces(question)


def skill_loader(tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, seed: int, start: int) -> DataLoader:
    """Batches from step `start` on: (ids, answers), both (b, t). answers: which positions predict a token of an answer.
    None where there are no skills, or they have no weight."""
    skills = skills_of(data, [lesson.probe for lesson in options.lessons])
    size = options.skill_batch_size
    steps = range(start * size, options.most_steps * size)
    if not (skills and options.skill_weight):
        nothing: Any = steps
        return DataLoader(nothing, batch_size=size, collate_fn=lambda _: None)
    prompts = Subset(SkillPrompts(skills, tokenizer, options, data, seed), steps)
    return DataLoader(prompts, batch_size=size, collate_fn=partial(_collated, tokenizer))


def _collated(tokenizer: PreTrainedTokenizerBase, sequences: list[list[Piece]]) -> tuple[Tensor, Tensor]:
    ids, targets = collate(tokenizer, sequences)
    return ids, targets != IGNORE
