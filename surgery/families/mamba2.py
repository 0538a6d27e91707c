"""Mamba-2 (arXiv 2405.21060) in its Hugging Face class: state-spaces' mamba2-*, Codestral-Mamba."""

import copy

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedConfig, PreTrainedModel

from surgery.errors import UserError
from surgery.families import COMMON, refuse_unhandled
from surgery.hybrid import Mamba2HybridConfig, Mamba2HybridForCausalLM, Mamba2HybridMixer
from surgery.plan import Plan

# Fields that the hybrid classes honour.
HANDLED = COMMON | {"num_heads", "head_dim", "n_groups", "time_step_limit", "chunk_size", "grafts", "auto_map", "surgery"}


class Mamba2Family:
    model_type = "mamba2"
    hybrid_type = Mamba2HybridConfig.model_type

    def check(self, config: PreTrainedConfig) -> None:
        refuse_unhandled(config, Mamba2Config(), HANDLED)

    def check_graftable(self) -> None:
        return

    def adopted(self, model: PreTrainedModel) -> bool:
        return isinstance(model, Mamba2HybridForCausalLM)

    def shape(self, config: PreTrainedConfig) -> tuple[int, int]:
        return config.num_hidden_layers, config.num_heads

    def empty(self, config: PreTrainedConfig, plan: Plan | None) -> Mamba2HybridForCausalLM:
        fields = {
            k: v for k, v in config.to_dict().items() if k not in ("model_type", "architectures", "grafts", "layer_types")
        }
        grafts = []
        for site in plan.sites if plan else ():
            assert plan is not None
            width = plan.width or max(32, config.state_size)
            signs = [plan.start(site.layer, head).sign for head in site.heads]
            grafts.append(
                {"layer": site.layer, "heads": list(site.heads), "signs": signs, "width": width, "shared": plan.shared,
                 "time_step": plan.time_step, "blend": plan.blend}
            )  # fmt: skip
        hybrid_config = Mamba2HybridConfig(**fields, grafts=grafts)
        with torch.device("meta"):
            model = Mamba2HybridForCausalLM(hybrid_config)
        return model

    def initialise(self, mixer: Mamba2HybridMixer, plan: Plan) -> None:
        """The dual start: query = C, key = B (rows of in_proj and their conv filters), and dimensions beyond the state size
        with random queries and zero keys, which add exactly nothing to the scores."""
        graft, n = mixer.graft, mixer.ssm_state_size
        assert graft is not None
        if graft.width < n:
            raise UserError(f"a dual graft needs a width of at least the state size, {n}; the plan says {graft.width}")
        pairs, groups = len(graft.pair_groups), mixer.n_groups
        generator = torch.Generator().manual_seed(plan.seed * 1009 + mixer.layer_idx)
        inner, state = mixer.intermediate_size, groups * n
        rows = {"k": slice(inner, inner + state), "q": slice(inner + state, inner + 2 * state)}  # conv channels of B and of C

        def fill(target: torch.Tensor, base: torch.Tensor, extra: float) -> None:
            """target (pairs * width, ...) from base (groups * n, ...); the dimensions beyond n are normal with std `extra`."""
            view = target.view(pairs, graft.width, *target.shape[1:])
            view.copy_(torch.randn(view.shape, generator=generator) * extra)
            view[:, :n] = base.view(groups, n, *base.shape[1:])[graft.pair_groups]

        half = pairs * graft.width
        with torch.no_grad():
            graft.log_tau.copy_(torch.tensor([plan.start(mixer.layer_idx, head).tau for head in graft.heads]).log())
            if graft.gate is not None:
                assert plan.blend is not None  # or there would be no gate
                graft.gate.fill_(plan.blend)
            for name, part, proj in (("q", slice(0, half), graft.q_proj), ("k", slice(half, 2 * half), graft.k_proj)):
                base_rows = mixer.in_proj.weight[inner:][rows[name]]
                spread = base_rows.std().item() if name == "q" else 0.0
                fill(proj.weight, base_rows, spread)
                taps = mixer.conv1d.weight[rows[name]]
                fill(graft.qk_conv.weight[part], taps, taps.std().item())
                if proj.bias is not None:
                    fill(proj.bias, mixer.in_proj.bias[inner:][rows[name]], 0.0)
                if graft.qk_conv.bias is not None:
                    assert mixer.conv1d.bias is not None  # both follow use_conv_bias
                    fill(graft.qk_conv.bias[part], mixer.conv1d.bias[rows[name]], 0.0)

    def empty_base(self, config: PreTrainedConfig) -> Mamba2ForCausalLM:
        skip = ("model_type", "architectures", "grafts", "layer_types", "auto_map", "surgery")
        fields = {k: v for k, v in config.to_dict().items() if k not in skip}
        with torch.device("meta"):
            model = Mamba2ForCausalLM(Mamba2Config(**copy.deepcopy(fields)))
        return model


FAMILY = Mamba2Family()
