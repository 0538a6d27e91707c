"""Calibration: the sharpness of all grafts' attention and the share of it in the heads' output, without gradients.

Two numbers are searched for one after the other, each on a grid that is then refined around its best point by a bounded
search, since the loss need not have one minimum only: a factor of every tau, and the gate of every head, where there is one.
What is found is never worse, on the examples that are looked at, than what was there.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from scipy.optimize import minimize_scalar
from torch import nn

from surgery.models.finite import NotFinite
from surgery.records.recipe import Calibrate
from surgery.tuning.shards import whole
from surgery.tuning.state import Log


@torch.no_grad()
def calibrate(trained: Mapping[str, nn.Parameter], options: Calibrate, losses: Callable[[], dict[str, float]]) -> Log:
    """Set tau and gate in place. losses: of the model as it is; "loss" is what is made small. Returns a record of every
    evaluation, with the value that was tried."""
    records: Log = []

    def measure(**tried: float) -> float:
        found = losses()
        records.append({"stage": "calibrate", "step": len(records) + 1, **found, **tried})
        return found["loss"] if math.isfinite(found["loss"]) else math.inf

    if not math.isfinite(least := measure()):
        raise NotFinite("the losses of the model as it is")
    with whole(trained.values()):
        scales = {p: p.clone() for name, p in trained.items() if name.endswith(".graft.log_tau")}
        gates = {p: p.clone() for name, p in trained.items() if name.endswith(".graft.gate")}

    def sharpen(factor: float) -> float:
        with whole(scales):
            for p, own in scales.items():
                p.copy_(own + math.log(factor))
        return measure(tau=factor)

    def blend(share: float | None) -> float:
        with whole(gates):
            for p, own in gates.items():
                p.copy_(own if share is None else torch.full_like(own, share))
        return measure(gate=share) if share is not None else least

    if scales:
        least = _search(
            lambda power: sharpen(2 ** (power or 0.0)), [math.log2(x) for x in options.tau], {0.0: least}, options.evaluations
        )
    if gates:
        _search(blend, options.gate, {None: least}, options.evaluations)
    return records


def _search(
    put: Callable[[float | None], float],
    grid: Sequence[float],
    tried: dict[float | None, float],
    evaluations: int,
) -> float:
    """Leave things at the point where the loss is least, and return that loss. put: go to a point; the loss there. tried: what
    is known; None is how things are, where that is not a point."""

    def objective(x: float) -> float:
        tried[float(x)] = put(float(x))
        return tried[float(x)]

    for x in grid:
        if x not in tried:
            objective(x)
    points = sorted(x for x in tried if x is not None)
    best = min(range(len(points)), key=lambda i: tried[points[i]])
    low, high = points[max(best - 1, 0)], points[min(best + 1, len(points) - 1)]
    if evaluations and low < high:
        minimize_scalar(objective, bounds=(low, high), method="bounded", options={"maxiter": evaluations})
    return put(min(tried, key=lambda x: tried[x]))
