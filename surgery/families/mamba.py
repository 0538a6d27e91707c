"""Mamba-1 (arXiv 2312.00752) in its Hugging Face class: state-spaces' mamba-*-hf. A head is a channel."""

from typing import Any

import torch
from torch import Tensor
from transformers import MambaForCausalLM
from transformers.models.mamba.modeling_mamba import MambaMixer

from surgery.errors import UserError
from surgery.families import COMMON
from surgery.families.dual_start import DualFamily, common_spec, generator, start_gate, widen
from surgery.hybrids.mamba import MambaLanguageModel
from surgery.hybrids.selective_mixer import SelectiveMixer
from surgery.hybrids.stock_hybrid import stock_hybrid
from surgery.models.quantised import dense
from surgery.records.plan import Plan, Start
from surgery.records.site import Site

HANDLED = COMMON | {"intermediate_size", "time_step_scale", "time_step_init_scheme", "use_mambapy", "use_associative_scan"}


class ChannelFamily(DualFamily):
    """Mamba-1 and its kin. Channels with the same start share a query-key pair, whatever the plan says about sharing: a pair
    costs 2 * width * intermediate_size numbers, and there are thousands of channels."""

    def graft(self, config: Any, plan: Plan, site: Site) -> dict[str, Any]:
        pairs: dict[Start, list[int]] = {}
        for place, head in enumerate(site.heads):
            pairs.setdefault(plan.start(site.layer, head), []).append(place)
        signs = [start.sign for start in pairs]
        return {**common_spec(plan, site, self.state_size(config)), "pairs": list(pairs.values()), "signs": signs}

    def cut(self, mixer: Any, kept: Tensor) -> dict[str, Tensor]:
        """Rows of B and C leave x_proj, and columns leave A."""
        if type(mixer).normalise is not SelectiveMixer.normalise:
            raise UserError(f"the state of a {self.model_type} stays as large as it is: B and C are normalised over all of it")
        rank, n, kept = mixer.time_step_rank, mixer.ssm_state_size, kept[0]
        rows = torch.cat([torch.arange(rank), rank + kept, rank + n + kept])
        return {"x_proj.weight": mixer.x_proj.weight[rows], "A_log": mixer.A_log[:, kept]}

    def initialise(self, mixer: Any, plan: Plan) -> None:
        """The dual start: query = C, key = B (rows of x_proj), and dimensions beyond the state size with random queries and
        zero keys, which add exactly nothing to the scores."""
        graft, n = mixer.graft, mixer.ssm_state_size
        random = generator(plan, mixer.layer_idx)
        _, B, C = dense(mixer.x_proj).split([mixer.time_step_rank, n, n])
        firsts = [graft.heads[places[0]] for places in graft.pairs]
        with torch.no_grad():
            graft.log_tau.copy_(torch.tensor([plan.start(mixer.layer_idx, channel).tau for channel in firsts]).log())
            start_gate(graft, plan)
            for proj, rows, extra in ((graft.q_proj, C, C.std().item()), (graft.k_proj, B, 0.0)):
                widen(proj.weight, rows[None], [0] * len(graft.pairs), extra, random)


MambaHybridForCausalLM = stock_hybrid(MambaForCausalLM, MambaMixer, SelectiveMixer, MambaLanguageModel)
MambaHybridConfig = MambaHybridForCausalLM.config_class
FAMILY = ChannelFamily(MambaHybridForCausalLM, HANDLED)
