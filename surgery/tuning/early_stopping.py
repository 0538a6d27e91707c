"""Early stopping: measures during tuning what it must not cost, the base's other skills (probes/skills.py) and perplexity.

Bench measures on other examples. The text comes from documents that are neither trained on nor in bench's held-out text.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.models.finite import checked, explained
from surgery.models.pieces import logits_in_pieces
from surgery.probes.scoring import answer
from surgery.probes.skills import names_of, skill_questions, skills_of
from surgery.records.recipe import Data, EarlyStopping, Tune
from surgery.runtime.processes import gather, share
from surgery.tuning.batches import held_out_windows
from surgery.tuning.distil import Distillation

BATCH = 16


class Guard:
    """Compares a model with the base. All processes get the same figures.

    divided: whether the processes divide the examples. If each holds a part of the model they must not, since all of them have
    to take part in every forward."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        bounds: EarlyStopping,
        data: Data,
        options: Tune,
        seed: int,
        *,
        divided: bool = True,
    ):
        self.tokenizer, self.bounds = tokenizer, bounds
        own_share: Callable[[Sequence], list] = share if divided else list
        skills = skills_of(data, [lesson.probe for lesson in options.lessons])
        self.questions = {
            name: own_share(skill_questions(skill, tokenizer, data, bounds.examples, seed))
            for name, skill in zip(names_of(skills), skills, strict=True)
        }
        rows = own_share(range(bounds.windows))
        ids, real = held_out_windows(tokenizer, data, options, bounds.windows, seed)
        self.text = ids[rows], real[rows]

    def measure(self, distillation: Distillation, base: bool = False) -> dict[str, float]:
        """{skill: accuracy, ..., "perplexity": per token} of the student as it is, or of the base."""
        whole = distillation.as_teacher() if base else nullcontext(distillation.student)
        with whole as model, distillation.autocast(model.device):
            own = []
            for questions in self.questions.values():
                correct = answer(model, self.tokenizer, questions).correct.sum() if questions else 0
                own += [int(correct), len(questions)]
            totals = [sum(column) for column in zip(*gather([(*own, *self._loss(model))]), strict=True)]
        *answers, nats, tokens = totals
        skills = zip(self.questions, answers[::2], answers[1::2], strict=True)
        return {name: correct / asked for name, correct, asked in skills} | {"perplexity": math.exp(nats / tokens)}

    @torch.no_grad()
    def _loss(self, model: PreTrainedModel) -> tuple[float, int]:
        """The negative log-likelihood of the text, in nats, and its tokens."""
        total, tokens = 0.0, 0
        batches = zip(*(side.to(model.device).split(BATCH) for side in self.text), strict=True)
        for ids, real in batches if len(self.text[0]) else ():
            targets, next_ids = real[:, 1:], ids[:, 1:]  # all tokens but the first of a row
            for piece, logits in logits_in_pieces(model, ids, torch.arange(targets.shape[1], device=ids.device)):
                chosen = targets[:, piece]
                loss = F.cross_entropy(logits[chosen].float(), next_ids[:, piece][chosen], reduction="sum")
                with explained(model):
                    total += checked(loss, "the losses of held-out text").item()
            tokens += int(targets.sum())
        return total, tokens

    def allows(self, figures: dict[str, float], base: dict[str, float]) -> bool:
        """Whether a model with these figures is within the bounds, given the figures of the base."""
        lost = max((base[skill] - figures[skill] for skill in self.questions), default=0.0)
        risen = figures["perplexity"] / base["perplexity"] - 1
        return lost <= self.bounds.accuracy and risen <= self.bounds.perplexity
