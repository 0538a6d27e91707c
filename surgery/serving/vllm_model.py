"""vLLM's Mamba-2 with attention at some heads.

modeling/mamba2.py derives what a grafted head computes: with w_ts = exp(sigma tau C'_t . B'_s) and a null key of logit b,

    W_t = sum_s w_ts dt_s,   m_t = W_t / (W_t + e^b),   y_t <- y_t + g (sigma N_t / (W_t + e^b) + m_t (D x_t - y_t))

where N_t = sum_s w_ts dt_s x_s. vLLM's kernels take scores that are products of a query and a key, and a sink: one more logit s
without a value. From values of two more columns, [dt x, dt, 1], they give, with Z_t = sum_s w_ts,

    [N_t, W_t, Z_t] / (Z_t + e^s)   and so   e^s / (Z_t + e^s) = 1 - r_t,   r_t the last column

so that everything is divided by the same number, and N / (W + (1 - r) e^(b - s)) is what is wanted. Any s will do; s = b +
SHIFT leaves 1 - r its digits where little falls to the null key. Without a time step, dt is 1; without a null key, e^b is 0.

vLLM runs a mixer as an opaque operator that calls `conv_ssm_forward`: no graph and no compiler looks inside. The projections
and the convolution of queries and keys are rows of the mixer's own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMambaPrefixCaching, SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from surgery.serving.vllm_limits import grafts_of, head_size, kv_heads

TINY = 1e-30  # dt below it is as good as not written
NATS = 20.0  # b = NATS * null, as in modeling/graft.py
SHIFT = 4.0
HANDED_ON = ("hidden_states", "residual")


class ServedHeads(nn.Module):
    """The parameters of a graft by their names in the checkpoint. channels: of its queries and keys together."""

    def __init__(self, spec: dict[str, Any]):
        super().__init__()
        count = len(spec["heads"])
        self.width, self.time_step, self.closed_below = spec["width"], bool(spec["time_step"]), spec.get("closed_below", 0.0)
        self.channels: int = 2 * count * self.width
        self.heads: Tensor
        self.signs: Tensor
        self.register_buffer("heads", torch.tensor(spec["heads"]), persistent=False)
        self.register_buffer("signs", torch.tensor(spec["signs"], dtype=torch.float32), persistent=False)
        self.log_tau = nn.Parameter(torch.zeros(count))
        gated = spec.get("gated", spec.get("blend") is not None)  # entries of 0.30 say so by a blend
        self.gate = nn.Parameter(torch.zeros(count)) if gated else None
        self.null = nn.Parameter(torch.zeros(count)) if spec.get("null") else None
        self.null_query = nn.Parameter(torch.zeros(count, self.width)) if spec.get("null_query") else None

    def split(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """qk (tokens, channels) -> q and k (tokens, heads, width), such that q . k is the score."""
        q, k = qk.view(len(qk), 2, -1, self.width).unbind(1)
        k = k if self.null_query is None else k - self.null_query.to(k.dtype)
        return q * (self.signs * self.log_tau.float().exp())[:, None].to(q.dtype), k


class Mixer2(MambaMixer2):
    """vLLM's, without checkpoints of prefills, which its kernels for CPUs do not have."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        spec: Any = super().get_kv_cache_spec(vllm_config)
        if not current_platform.is_cpu():
            return spec
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)


class HybridMixer2(Mixer2):
    """A Mamba-2 mixer some of whose heads are attention. The scan runs over all of them: vLLM's kernels know no gaps."""

    def __init__(self, config: Any, spec: dict[str, Any], vllm_config: VllmConfig, prefix: str):
        super().__init__(**mixer_arguments(config, vllm_config), prefix=prefix)
        graft = self.graft = ServedHeads(spec)
        self.config, self.each, self.attention_size = config, kv_heads(config), head_size(config)
        groups = len(spec["heads"]) // self.each
        self.sinks = nn.ParameterList(
            nn.Parameter(torch.zeros(self.each, dtype=torch.bfloat16), requires_grad=False)
            for _ in range(groups if graft.null is not None else 0)
        )
        self.attend = nn.ModuleList(
            Attention(
                self.each,
                self.attention_size,
                1.0,
                num_kv_heads=self.each,
                cache_config=vllm_config.cache_config,
                prefix=f"{prefix}.attend_{i}",
                **({"sinks": self.sinks[i]} if graft.null is not None else {}),
            )
            for i in range(groups)
        )
        state = self.groups_ssm_state_size
        self.sizes = [self.intermediate_size, state, state]  # of x, B and C
        self.in_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [self.intermediate_size, *self.sizes, graft.channels, self.num_heads],
            bias=config.use_bias,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.in_proj",
        )
        self.conv_dim += graft.channels
        self.tped_conv_size = self.conv_dim
        self.conv1d = MergedColumnParallelLinear(
            config.conv_kernel,
            [*self.sizes, graft.channels],
            bias=config.use_conv_bias,
            quant_config=None,
            prefix=f"{prefix}.conv1d",
        )
        weight = self.conv1d.weight
        weight.data = weight.data.unsqueeze(1)  # as the parent does: a checkpoint's is (channels, 1, taps)
        self.conv_weights = weight.view(weight.size(0), weight.size(2))
        self.seen: list[Tensor] = []
        self.split_hidden_states_B_C_fn = self._split

    def _split(self, channels: Tensor) -> tuple[Tensor, ...]:
        """The parent hands over what has passed the convolution: of the prompts first, then of the tokens that follow one. Here
        the graft sees it too."""
        self.seen.append(channels)
        return channels[:, : sum(self.sizes)].split(self.sizes, dim=-1)

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> None:
        self.seen.clear()
        super().conv_ssm_forward(projected_states, output)
        parts, self.seen = self.seen[::-1], []  # in a batch the tokens that follow a prompt stand before the prompts
        everything = get_forward_context().attn_metadata
        if everything is None:  # vLLM measures memory: there is nothing to attend to
            return
        metadata = everything[self.prefix]
        tokens = metadata.num_prefill_tokens + metadata.num_decode_tokens
        channels = parts[0] if len(parts) == 1 else torch.cat(parts)
        graft, heads = self.graft, self.graft.heads
        x = channels[:tokens, : self.intermediate_size].view(tokens, self.num_heads, self.head_dim)[:, heads]
        qk = channels[:tokens, sum(self.sizes) :]
        dt = F.softplus(projected_states[:tokens, -self.num_heads :].float() + self.dt_bias.float())[:, heads]
        found, m = self._attended(x, qk, dt)
        y = output[:tokens].view(tokens, self.num_heads, self.head_dim)
        own, skip = y[:, heads].float(), self.D.float()[heads][:, None] * x.float()
        gate = 1.0 if graft.gate is None else graft.gate.float()[:, None]
        new = own + gate * (found + m[..., None] * (skip - own))
        if graft.closed_below > 0:
            new = torch.where((m >= graft.closed_below)[..., None], new, own)
        y[:, heads] = new.to(y.dtype)

    def _attended(self, x: Tensor, qk: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
        """x (tokens, grafted heads, p), qk (tokens, channels), dt (tokens, grafted heads) -> what is looked up (tokens, grafted
        heads, p), and m (tokens, grafted heads), in float32."""
        graft, size = self.graft, self.attention_size
        q, k = graft.split(qk)
        ones = torch.ones_like(dt)[..., None]
        written = dt.clamp_min(TINY)[..., None] if graft.time_step else ones
        parts = [written * x.float(), *([written] if graft.time_step else []), *([ones] if graft.null is not None else [])]
        v = torch.cat(parts, dim=-1).to(x.dtype)
        q, k, v = (F.pad(part, (0, size - part.shape[-1])).unflatten(1, (-1, self.each)).flatten(2) for part in (q, k, v))
        y = torch.stack([attention(q[:, i], k[:, i], v[:, i]) for i, attention in enumerate(self.attend)], dim=1)
        y = y.view(len(x), -1, size).float()
        sums, more = y[..., : self.head_dim], iter(y[..., self.head_dim :].unbind(-1))
        w = next(more) if graft.time_step else None
        if graft.null is None:
            total = torch.ones_like(dt) if w is None else w
            m = torch.ones_like(dt)
        else:
            r = next(more)
            w = r if w is None else w
            logits = NATS * graft.null.float()
            sinks = torch.cat([sink.float() for sink in self.sinks])
            total = w + (1 - r).clamp_min(0) * (logits - sinks).exp()
            m = w / total.clamp_min(TINY)
        return sums / total.clamp_min(TINY)[..., None] * graft.signs[:, None], m

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return state_shape(self.config, self.graft.channels, self.num_spec)


def state_shape(config: Any, channels: int, speculated: int) -> tuple[tuple[int, ...], ...]:
    """Of what a mixer keeps of a request: its convolution's last inputs, `channels` of a graft's among them, and its state."""
    return MambaStateShapeCalculator.mamba2_state_shape(
        tp_world_size=1,
        intermediate_size=int(config.expand * config.hidden_size) + channels,
        n_groups=config.n_groups,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        state_size=config.state_size,
        conv_kernel=config.conv_kernel,
        num_spec=speculated,
    )


def mixer_arguments(config: Any, vllm_config: VllmConfig) -> dict[str, Any]:
    """What MambaMixer2 takes, from a configuration of Mamba-2."""
    return {
        "hidden_size": config.hidden_size,
        "ssm_state_size": config.state_size,
        "conv_kernel_size": config.conv_kernel,
        "intermediate_size": int(config.expand * config.hidden_size),
        "use_conv_bias": config.use_conv_bias,
        "use_bias": config.use_bias,
        "n_groups": config.n_groups,
        "num_heads": config.num_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.layer_norm_epsilon,
        "activation": config.hidden_act,
        "model_config": vllm_config.model_config,
        "cache_config": vllm_config.cache_config,
        "quant_config": vllm_config.quant_config,
    }


class Block(nn.Module):
    """Norm and mixer; the residual stream is handed on beside what is to be added to it, as everywhere in vLLM."""

    def __init__(self, vllm_config: VllmConfig, layer: int, prefix: str):
        super().__init__()
        config = vllm_config.model_config.hf_config
        spec, name = grafts_of(config).get(layer), f"{prefix}.mixer"
        self.mixer: Any = (
            Mixer2(**mixer_arguments(config, vllm_config), prefix=name)
            if spec is None
            else HybridMixer2(config, spec, vllm_config, name)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual, hidden = hidden, self.norm(hidden)
        else:
            hidden, residual = self.norm(hidden, residual)
        return self.mixer(hidden), residual


@support_torch_compile
class ServedMamba2Model(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: Block(vllm_config, int(prefix.rpartition(".")[2]), prefix),
            prefix=f"{prefix}.layers",
        )
        self.norm_f = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Tensor | None = None
    ) -> Any:
        """In a pipeline each process has some of the layers, and hands on what they gave to the next."""
        residual = None
        if not get_pp_group().is_first_rank:
            hidden, residual = (intermediate_tensors[name] for name in HANDED_ON)
        else:
            hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers[self.start_layer : self.end_layer]:
            hidden, residual = layer(hidden, residual)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors(dict(zip(HANDED_ON, (hidden, residual), strict=True)))
        hidden, _ = self.norm_f(hidden, residual)
        return hidden


class ServedMamba2ForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsPP, SupportsMambaPrefixCaching):
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_substr={".A_log": ".A"})

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.backbone = ServedMamba2Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "backbone"))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.backbone.embeddings)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(list(HANDED_ON), config.hidden_size)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        cache = vllm_config.cache_config
        return MambaStateDtypeCalculator.mamba2_state_dtype(
            vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Of the layer that keeps the most: vLLM's pages hold any layer's."""
        config = vllm_config.model_config.hf_config
        channels = max(ServedHeads(spec).channels for spec in config.grafts)
        return state_shape(config, channels, vllm_config.num_speculative_tokens)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        return MambaStateCopyFuncCalculator.mamba2_state_copy_func()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.backbone.embeddings(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Any:
        return self.backbone(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = AutoWeightsLoader(self).load_weights(self._joined(weights), mapper=self.hf_to_vllm_mapper)
        for name, module in self.named_modules():
            if isinstance(module, HybridMixer2):
                if module.graft.null is not None:  # the logits of the sinks, which kernels read in bfloat16
                    logits = (NATS * module.graft.null.float() + SHIFT).view(-1, module.each)
                    for sink, value in zip(module.sinks, logits, strict=True):
                        sink.data.copy_(value)
                loaded |= {f"{name}.sinks.{i}" for i in range(len(module.sinks))}
        return loaded

    def _joined(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors, those of a graft's projections and convolution as rows of their mixer's."""
        parts_of: dict[str, list[str]] = {}
        for layer in grafts_of(self.config):
            parts_of |= joined_parts(f"backbone.layers.{layer}.mixer", self.config)
        whole_of = {part: whole for whole, parts in parts_of.items() for part in parts}
        waiting: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name not in whole_of:
                yield name, tensor
                continue
            waiting[name] = tensor
            whole = whole_of[name]
            if all(part in waiting for part in parts_of[whole]):
                first, *others = (waiting.pop(part) for part in parts_of[whole])
                # in_proj: gate, x, B, C, then queries and keys, then dt.
                after = self.config.num_heads if ".in_proj." in whole else 0
                yield whole, torch.cat([first[: len(first) - after], *others, first[len(first) - after :]])
        if waiting:
            raise ValueError(f"the checkpoint is not whole: {', '.join(sorted(waiting))} came without what belongs to it")


def joined_parts(mixer: str, config: Any) -> dict[str, list[str]]:
    """Of what names each of a mixer's widened tensors is put together."""
    kinds = ["weight", *(["bias"] if config.use_bias else [])]
    parts = {
        f"{mixer}.in_proj.{kind}": [f"{mixer}.{name}.{kind}" for name in ("in_proj", "graft.q_proj", "graft.k_proj")]
        for kind in kinds
    }
    for kind in ("weight", *(["bias"] if config.use_conv_bias else [])):
        parts[f"{mixer}.conv1d.{kind}"] = [f"{mixer}.conv1d.{kind}", f"{mixer}.graft.qk_conv.{kind}"]
    return parts
