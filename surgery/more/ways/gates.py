"""Joint gates: all heads grafted behind gates that begin at 0, all weights frozen, and the gates trained together on the
probe's questions under a penalty on their sum (as arXiv 2606.30562 and 2606.20097 do). The heads whose gates open most are
taken."""

import numpy as np
import torch

from surgery.choosing.task import ChoiceTask, Most, most_chosen
from surgery.locating.attribution import answer_losses, frozen
from surgery.locating.walk import fully_gated
from surgery.models.finite import checked
from surgery.probes.scoring import batches
from surgery.records.plan import Plan
from surgery.records.recipe import PlanOptions
from surgery.runtime.progress import counting

STEPS = 60  # each on a batch of questions
RATE = 0.02
PENALTY = 0.02  # nats for a gate that is wholly open


def choose(task: ChoiceTask) -> Plan:
    """Each head starts as locate found best for it. Gates stay between 0 and 1."""
    heads = task.ranking.columns
    starts = {str(heads.site(int(i))): start for i in task.graftable() if (start := heads.start(int(i))) is not None}
    gated = fully_gated(task.subject, starts)
    mixers = gated.anatomy.ssms
    gates: list[torch.Tensor] = [mixer.module.get_parameter("graft.gate") for mixer in mixers]
    groups = [encoded for _, encoded in batches(task.subject.tokenizer, task.questions, task.batch_size)]
    order = np.random.default_rng(task.seed)
    with frozen(gated.model), counting(STEPS, "plan, joint gates") as advance:
        for gate in gates:
            gate.requires_grad_(True)
        optimizer = torch.optim.Adam(gates, lr=RATE)
        for _ in range(STEPS):
            encoded = groups[order.integers(len(groups))]
            loss = answer_losses(gated, encoded).mean() + PENALTY * torch.cat(gates).sum()
            checked(loss.detach()[None], "the loss under joint gates")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for gate in gates:
                    gate.clamp_(0, 1)
            advance()
    opened = {
        (mixer.layer, mixer.first + head): float(value)
        for mixer, gate in zip(mixers, gates, strict=True)
        for head, value in enumerate(gate.detach())
    }
    values = [opened.get((int(layer), int(head)), -1.0) for layer, head in zip(heads.layer, heads.head, strict=True)]
    return task.chosen(task.units(np.argsort(-np.array(values), kind="stable")))


def most(options: PlanOptions, heads: int, bounded: bool) -> Most:
    """A step of the gates takes about as long as measuring three plans on a batch of questions."""
    return most_chosen(options, heads, bounded)._replace(asked=3 * STEPS)
