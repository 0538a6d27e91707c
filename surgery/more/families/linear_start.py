"""How grafts start in mixers that have a query and a key of their own, as those of linear attention do: as copies of them."""

from typing import Any

import torch
from torch import Tensor

from surgery.errors import UserError
from surgery.families.dual_start import DualFamily, common_spec, generator, start_gate, widen
from surgery.records.plan import Plan
from surgery.records.site import Site


class LinearFamily(DualFamily):
    """A subclass says which rows of which projections make queries and keys, and what follows them.

    time_step: whether the mixer writes with a strength, whose logarithm may stand in the scores.
    """

    time_step = True

    def rows(self, mixer: Any) -> tuple[Tensor, Tensor]:
        """Of queries and of keys, (groups, n, hidden) each."""
        raise NotImplementedError

    def biases(self, mixer: Any) -> tuple[Tensor, Tensor]:
        """Of queries and of keys, (groups, n) each, where there are any."""
        raise NotImplementedError

    def filters(self, mixer: Any) -> Tensor | None:
        """Those of the convolution of queries and keys, (2, groups, n, 1, taps); None where there is none."""
        return None

    def graft(self, config: Any, plan: Plan, site: Site) -> dict[str, Any]:
        size = self.state_size(config)
        if plan.width not in (None, size):
            raise UserError(
                f"a dual graft of {self.model_type} has queries and keys as wide as the base's, {size}, not {plan.width}"
            )
        signs = [plan.start(site.layer, head).sign for head in site.heads]
        spec = common_spec(plan.model_copy(update={"width": size}), site, size)
        time_step = spec["time_step"] and self.time_step
        return {**spec, "time_step": time_step, "signs": signs, "shared": plan.shared, "direct": False}

    def initialise(self, mixer: Any, plan: Plan) -> None:
        """The dual start: queries and keys from the base's rows of both and their conv filters."""
        graft, groups = mixer.graft, mixer.graft.pair_groups
        random = generator(plan, mixer.layer_idx)
        projections = (graft.q_proj, graft.k_proj)
        with torch.no_grad():
            graft.log_tau.copy_(torch.tensor([plan.start(mixer.layer_idx, head).tau for head in graft.heads]).log())
            start_gate(graft, plan)
            for projection, rows in zip(projections, self.rows(mixer), strict=True):
                widen(projection.weight, rows, groups, 0.0, random)
            if graft.q_proj.bias is not None:
                for projection, bias in zip(projections, self.biases(mixer), strict=True):
                    widen(projection.bias, bias, groups, 0.0, random)
            filters = self.filters(mixer)
            if filters is not None:
                for own, taps in zip(graft.qk_conv.weight.chunk(2), filters, strict=True):
                    widen(own, taps, groups, 0.0, random)
