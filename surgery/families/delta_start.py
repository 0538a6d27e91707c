"""How grafts in Gated DeltaNet's mixers start (surgery/hybrids/gated_delta.py). One family for each class that has them."""

from typing import Any

import torch
from torch import Tensor

from surgery.errors import UserError
from surgery.families.dual_start import common_spec, generator, start_gate, widen
from surgery.families.stock import StockFamily
from surgery.models.quantised import dense
from surgery.records.plan import Plan
from surgery.records.site import Site


class DeltaFamily(StockFamily):
    """A subclass says which rows of which projections make queries and keys."""

    donor_heads = True

    def rows(self, mixer: Any) -> tuple[Tensor, Tensor]:
        """Of queries and of keys, (groups, n, hidden) each."""
        raise NotImplementedError

    def shape(self, config: Any) -> tuple[int, int]:
        return config.num_hidden_layers, config.linear_num_value_heads

    def state_size(self, config: Any) -> int:
        return config.linear_key_head_dim

    def graft(self, config: Any, plan: Plan, site: Site) -> dict[str, Any]:
        size = self.state_size(config)
        direct = plan.init == "donor"
        if not direct and plan.width not in (None, size):
            raise UserError(
                f"a dual graft of {self.model_type} has queries and keys as wide as the base's, {size}, not {plan.width}"
            )
        signs = [plan.start(site.layer, head).sign for head in site.heads]
        spec = common_spec(plan.model_copy(update={"width": plan.width or size}), site, size)
        return {**spec, "signs": signs, "shared": plan.shared, "direct": direct}

    def initialise(self, mixer: Any, plan: Plan) -> None:
        """The dual start: queries and keys from the base's rows of both and their conv filters."""
        graft, groups, size = mixer.graft, mixer.num_k_heads, mixer.head_k_dim
        random = generator(plan, mixer.layer_idx)
        with torch.no_grad():
            graft.log_tau.copy_(torch.tensor([plan.start(mixer.layer_idx, head).tau for head in graft.heads]).log())
            start_gate(graft, plan)
            filters = mixer.conv1d.weight[: 2 * mixer.key_dim].view(2, groups, size, *mixer.conv1d.weight.shape[1:])
            own = graft.qk_conv.weight.chunk(2)
            for projection, rows, part, taps in zip((graft.q_proj, graft.k_proj), self.rows(mixer), own, filters, strict=True):
                widen(projection.weight, rows, graft.pair_groups, 0.0, random)
                widen(part, taps, graft.pair_groups, 0.0, random)


class FusedDeltaFamily(DeltaFamily):
    """Qwen3-Next's projection, which has the rows of one group after the other."""

    def rows(self, mixer: Any) -> tuple[Tensor, Tensor]:
        grouped = dense(mixer.in_proj_qkvz).unflatten(0, (mixer.num_k_heads, -1))
        return grouped[:, : mixer.head_k_dim], grouped[:, mixer.head_k_dim : 2 * mixer.head_k_dim]


class SplitDeltaFamily(DeltaFamily):
    """Qwen3.5's: queries, keys, values."""

    def rows(self, mixer: Any) -> tuple[Tensor, Tensor]:
        q, k = dense(mixer.in_proj_qkv)[: 2 * mixer.key_dim].unflatten(0, (2, mixer.num_k_heads, -1))
        return q, k


class SeparateDeltaFamily(DeltaFamily):
    """OLMo-Hybrid's."""

    def rows(self, mixer: Any) -> tuple[Tensor, Tensor]:
        q, k = (dense(projection).unflatten(0, (mixer.num_k_heads, -1)) for projection in (mixer.q_proj, mixer.k_proj))
        return q, k
