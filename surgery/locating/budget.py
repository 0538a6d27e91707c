"""Before a search begins: how well does the base do what it is asked, and how long would measuring every head exactly take?"""

import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from surgery.locating.exact import Exact
from surgery.locating.questions import Asked, described
from surgery.models.anatomy import Anatomy
from surgery.models.answers import settle
from surgery.probes.scoring import padded
from surgery.runtime import processes
from surgery.runtime.progress import busy, duration, say
from surgery.statistics import Proportion, at_chance, proportion

CEILING = 0.98  # an accuracy above which hardly anything is left to gain


def look_at_base(measured: Exact, asked: Asked) -> tuple[Proportion, float]:
    """(the base's accuracy on the questions, that of guessing). Says so where heads could not be located by them."""
    with busy("asking the base"):
        measured.measure([], layers=False)
    accuracy, chance = proportion(measured.correct["base", None]), chance_of(asked)
    what = described(asked.name, asked.options)
    if at_chance(accuracy, chance):
        say(
            f"warning: the base is at chance on {what}: accuracy {accuracy}, chance {chance:.3f}. Heads that are located by it "
            "mean nothing, and no gain will be called a gain; choose a probe that the base can do in part (fewer pairs, say)"
        )
    elif accuracy.accuracy >= CEILING:
        say(
            f"note: the base is next to perfect on {what}: accuracy {accuracy}. A gain cannot show there; choose a probe on "
            "which it fails at times (more pairs, say)"
        )
    return accuracy, chance


def chance_of(asked: Asked) -> float:
    """The accuracy of guessing among the candidates."""
    return float(np.mean([1 / len(question.choices) for question in asked.questions]))


def affordable(
    measured: Exact,
    found: Anatomy,
    rounds: list[Asked],
    *,
    kinds: int,
    layers: bool,
    budget: float,
    keep: Callable[[bool], bool],
) -> bool:
    """Whether measuring every head exactly takes at most `budget` seconds, by the time of one forward of this model. Says what
    is done. All processes get the same answer.

    rounds: the questions of the ranking and of its repetitions. kinds: in how many ways a head is changed (ablated, spliced).
    keep: takes the decision, and returns that of an interrupted run where there is one: a clock does not decide twice.
    """

    def decide() -> bool:
        settle(measured.base)
        encoded = rounds[0].groups[0][1]
        with busy("timing the model"):
            step = _seconds(partial(_forward, measured, *padded(encoded.rows, measured.base.device)))
        seconds = step * forwards(found, rounds, kinds=kinds, layers=layers) / processes.state().num_processes
        exact, heads = keep(seconds <= budget), f"{len(found.sites()):,} heads"
        if exact:
            say(f"measuring {heads} in {len(found.layers())} layers exactly: about {duration(seconds)}")
        else:
            say(
                f"locating by attribution alone: measuring {heads} exactly would take about {duration(seconds)}, more than "
                f"locate.budget ({duration(budget)}). locate.exact=true measures all of them, locate.confirm=0.05 the first 5%"
            )
        return exact

    return processes.on_main(decide)


def forwards(found: Anatomy, rounds: list[Asked], *, kinds: int, layers: bool) -> float:
    """How many forwards of a batch an exact scan costs: a head costs the layers from its own on."""
    depth = len(found.blocks)
    shares = {layer: (depth - layer) / depth for layer in found.layers()}
    heads = sum(found.heads(layer) * share for layer, share in shares.items())
    first = 1 + kinds * (heads + (sum(shares.values()) if layers else 0))
    batches = [len(asked.groups) for asked in rounds]
    return batches[0] * first + sum(batches[1:]) * (1 + heads)  # the repetitions score the heads in one way


@torch.inference_mode()
def _forward(measured: Exact, ids: torch.Tensor, last: torch.Tensor) -> None:
    measured.base(input_ids=ids, use_cache=False, logits_to_keep=last.unique())
    if ids.device.type == "cuda":
        torch.cuda.synchronize(ids.device)


def _seconds(work: Callable[[], None]) -> float:
    """The shorter of two times: the first call also sets up what later ones find ready."""
    best = math.inf
    for _ in range(2):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
