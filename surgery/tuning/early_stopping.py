"""Early stopping: measures during tuning what it must not cost, knowledge and perplexity.

Bench measures on other examples. The dictionaries are drawn from other seeds. The text comes from documents that are neither
trained on nor in bench's held-out text. The small world's facts are the same, but are asked here in sentences of the training
split, which bench never uses. The facts of a file (data.facts) have one sentence each, so they are divided: bench does not ask
those that are asked here (probes/knowledge.py).
"""

import math
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.models.finite import checked, explained
from surgery.models.pieces import logits_in_pieces
from surgery.probes.knowledge import Knowledge
from surgery.probes.question import Question
from surgery.probes.scoring import answer
from surgery.records.recipe import Data, EarlyStopping, Tune
from surgery.runtime.processes import gather, share
from surgery.tuning.batches import held_out_windows
from surgery.tuning.distil import Distillation
from surgery.world.facts import RELATIONS, Fact, facts

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
        self.questions = own_share(questions(data.facts, bounds.examples, seed))
        rows = own_share(range(bounds.windows))
        ids, real = held_out_windows(tokenizer, data, options, bounds.windows, seed)
        self.text = ids[rows], real[rows]

    def measure(self, distillation: Distillation, base: bool = False) -> dict[str, float]:
        """{"knowledge": accuracy, "perplexity": per token} of the student as it is, or of the base."""
        whole = distillation.as_teacher() if base else nullcontext(distillation.student)
        with whole as model, distillation.autocast(model.device):
            correct = answer(model, self.tokenizer, self.questions).correct.sum() if self.questions else 0
            shares = gather([(int(correct), len(self.questions), *self._loss(model))])
        correct, questions, nats, tokens = (sum(column) for column in zip(*shares, strict=True))
        return {"knowledge": correct / questions, "perplexity": math.exp(nats / tokens)}

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
        lost = base["knowledge"] - figures["knowledge"]
        risen = figures["perplexity"] / base["perplexity"] - 1
        return lost <= self.bounds.knowledge and risen <= self.bounds.perplexity


def questions(source: str, n: int, seed: int) -> list[Question]:
    """At most n questions about the facts of `source`. Of a file: the part that bench does not ask. Of the world: in sentences
    that training uses."""
    if source != "world":
        return Knowledge(source, "keep").questions(n, seed)
    rng, known = random.Random(f"keep {seed}"), facts()
    chosen = rng.sample(known, min(n, len(known)))
    return [Question(_seen(rng, f), tuple(f" {c}" for c in f.choices), f.choices.index(f.value)) for f in chosen]


def _seen(rng: random.Random, fact: Fact) -> str:
    templates = range(len(RELATIONS[fact.relation][2]))
    return fact.prompt(rng.choice([template for template in templates if template != fact.held_out_template]))
