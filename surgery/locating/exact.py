"""Exact gains: what a head saves when it becomes untrained attention, measured by making it attention.

Each head gets the graft that `splice` would put there, with the gate at 1, in turn; the batch runs again from its layer on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from surgery.locating.ablation import Unit
from surgery.locating.replay import Replay
from surgery.models.anatomy import anatomy
from surgery.probes.encoded import Encoded
from surgery.records.plan import Plan, Start
from surgery.records.site import Site
from surgery.runtime.progress import bar
from surgery.splicing.splice import describe, graft_dtype, start


def measure_gains(model: Any, encoded: Encoded, units: Sequence[tuple[Unit, Start]], batch_size: int = 32) -> dict[str, Tensor]:
    """Name of a unit -> nats saved (questions,) when it becomes attention that starts so. model: adopted."""
    blocks, gains = anatomy(model).blocks, {unit.name: torch.zeros(len(encoded), dtype=torch.float64) for unit, _ in units}
    for chosen, part in bar(list(encoded.batches(batch_size)) if units else [], "exact gains"):
        replay = Replay(model, blocks, part)
        for unit, begins in units:
            with grafted(model, unit, begins):
                gains[unit.name][chosen] = replay.loss - replay.run(unit.layer)[0]
    return gains


@contextmanager
def grafted(model: Any, unit: Unit, begins: Start) -> Iterator[None]:
    """An adopted model with untrained attention at one unit."""
    site = Site(unit.layer, unit.heads)
    plan, mixer = Plan(sites=(site,), starts=dict.fromkeys(site.head_names, begins)), unit.place.module
    mixer.put_graft(describe(model, site, plan), -1)
    try:
        start(mixer, plan)
        mixer.graft.to(mixer.out_proj.weight.device, graft_dtype(model, mixer.out_proj)).eval()
        yield
    finally:
        mixer.graft = None
