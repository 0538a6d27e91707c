"""Calibration: sets the sharpness of the grafts' attention, and its share in the heads' output, without gradients.

Two numbers are searched for, one after the other: a factor for every tau, and the gate of every head that has one. The loss may
have several minima, so each search begins with a grid and is then refined around the best point by a bounded search. The result
is never worse, on the examples that are measured, than what was there before.
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
    """Set tau and gate in place. losses: measures the model as it is; "loss" is minimised. Returns a record of every
    evaluation, with the value that was tried. Raises NotFinite if the losses are not finite before anything is changed."""
    records: Log = []

    def measure(**tried: float) -> float:
        figures = losses()
        records.append({"stage": "calibrate", "step": len(records) + 1, **figures, **tried})
        return figures["loss"] if math.isfinite(figures["loss"]) else math.inf

    if not math.isfinite(lowest := measure()):
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
        return measure(gate=share) if share is not None else lowest

    if scales:
        lowest = _search(
            lambda power: sharpen(2 ** (power or 0.0)), [math.log2(x) for x in options.tau], {0.0: lowest}, options.evaluations
        )
    if gates:
        _search(blend, options.gate, {None: lowest}, options.evaluations)
    return records


def _search(
    put: Callable[[float | None], float],
    grid: Sequence[float],
    tried: dict[float | None, float],
    evaluations: int,
) -> float:
    """Go to the point with the lowest loss, and return that loss. put: goes to a point and returns the loss there. tried: the
    known losses by point; None stands for the state at the beginning, where that is no point of the grid."""

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
