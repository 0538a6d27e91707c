"""Mamba-2 (arXiv 2405.21060) in its Hugging Face class: state-spaces' mamba2-*, Codestral-Mamba."""

from typing import Any

import torch
from torch import Tensor
from transformers import Mamba2ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from surgery.families import COMMON
from surgery.families.dual_start import DualFamily, common_spec, generator, start_gate, widen
from surgery.hybrids.mamba2 import Mamba2LanguageModel
from surgery.hybrids.ssd_mixer import SSDMixer
from surgery.hybrids.stock_hybrid import stock_hybrid
from surgery.models.quantised import dense
from surgery.records.plan import Plan
from surgery.records.site import Site


class Mamba2Family(DualFamily):
    """Whose mixers are Mamba-2's."""

    gate_first = True  # whether in_proj has the gate before what the convolution takes

    def graft(self, config: Any, plan: Plan, site: Site) -> dict[str, Any]:
        signs = [plan.start(site.layer, head).sign for head in site.heads]
        own = {"signs": signs, "shared": plan.shared, "direct": False}
        own |= {"own_values": True} if plan.init == "copy" else {}
        return {**common_spec(plan, site, self.state_size(config)), **own}

    def projection(self, mixer: Any) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of what B and C are projected with."""
        return dense(mixer.in_proj), mixer.in_proj.bias

    def left(self, mixer: Any, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows of in_proj and which channels of the convolution stay."""
        inner, n = mixer.intermediate_size, mixer.ssm_state_size
        rows = (kept + n * torch.arange(len(kept))[:, None]).flatten()
        channels = torch.cat([torch.arange(inner), inner + rows, inner + len(kept) * n + rows])
        gate, steps = torch.arange(inner), inner + mixer.conv_dim + torch.arange(mixer.num_heads)
        return torch.cat([gate, inner + channels, steps]), channels

    def cut(self, mixer: Any, kept: Tensor) -> dict[str, Tensor]:
        """Rows of B and C leave in_proj, and with them their filters."""
        projected, channels = self.left(mixer, kept)
        cut = {"in_proj.weight": mixer.in_proj.weight[projected], "conv1d.weight": mixer.conv1d.weight[channels]}
        if mixer.in_proj.bias is not None:
            cut["in_proj.bias"] = mixer.in_proj.bias[projected]
        if mixer.conv1d.bias is not None:
            cut["conv1d.bias"] = mixer.conv1d.bias[channels]
        return cut

    def initialise(self, mixer: Any, plan: Plan) -> None:
        """The dual start: query = C, key = B (rows of in_proj and their conv filters), and dimensions beyond the state size
        with random queries and zero keys, which add exactly nothing to the scores."""
        graft, n, groups = mixer.graft, mixer.ssm_state_size, mixer.n_groups
        assert graft is not None
        random = generator(plan, mixer.layer_idx)
        inner, state = mixer.intermediate_size, groups * n
        rows = {"k": slice(inner, inner + state), "q": slice(inner + state, inner + 2 * state)}  # conv channels of B and of C
        first = inner if self.gate_first else 0
        half = len(graft.pair_groups) * graft.width
        weight, bias = self.projection(mixer)

        def fill(target: Tensor, base: Tensor, extra: float) -> None:
            widen(target, base.view(groups, n, *base.shape[1:]), graft.pair_groups, extra, random)

        with torch.no_grad():
            graft.log_tau.copy_(torch.tensor([plan.start(mixer.layer_idx, head).tau for head in graft.heads]).log())
            start_gate(graft, plan)
            for name, part, proj in (("q", slice(0, half), graft.q_proj), ("k", slice(half, 2 * half), graft.k_proj)):
                base_rows = weight[first:][rows[name]]
                spread = base_rows.std().item() if name == "q" else 0.0
                fill(proj.weight, base_rows, spread)
                taps = mixer.conv1d.weight[rows[name]]
                fill(graft.qk_conv.weight[part], taps, taps.std().item())
                if proj.bias is not None:
                    assert bias is not None  # both have one, or none has
                    fill(proj.bias, bias[first:][rows[name]], 0.0)
                if graft.qk_conv.bias is not None:
                    assert mixer.conv1d.bias is not None  # both follow use_conv_bias
                    fill(graft.qk_conv.bias[part], mixer.conv1d.bias[rows[name]], 0.0)


HANDLED = COMMON | {"num_heads", "head_dim", "n_groups", "time_step_limit", "chunk_size", "surgery"}
Mamba2HybridForCausalLM = stock_hybrid(Mamba2ForCausalLM, Mamba2Mixer, SSDMixer, Mamba2LanguageModel)
Mamba2HybridConfig = Mamba2HybridForCausalLM.config_class
FAMILY = Mamba2Family(Mamba2HybridForCausalLM, HANDLED, copies=True)
