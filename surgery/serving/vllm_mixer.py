"""A Mamba-2 mixer of vLLM's with a head graft.

hybrids/mamba2.py derives what a grafted head computes:

    y_t = sigma sum_{s<=t} softmax_s(sigma tau C'_t . B'_s + log dt_s) x_s + D x_t

vLLM's kernels take scores that are products of a query and a key, of a width that they were compiled for. So log dt is no part
of the score here. With w_ts = exp(sigma tau C'_t . B'_s), the sum is a quotient of two sums that the kernel forms in one call,
from values with one more dimension, [dt_s x_s, dt_s]:

    sum_s w_ts dt_s x_s / sum_s w_ts dt_s

The softmax's own denominator cancels, and queries and keys keep their width.

vLLM runs a mixer as an opaque operator that calls `conv_ssm_forward`: no graph and no compiler looks inside.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.platforms import current_platform

from surgery.serving.limits import head_size, is_layer_graft, kv_heads

TINY = 1e-30  # dt below it is as good as not written


class ServedHeads(nn.Module):
    """The parameters of a head graft by their names in the checkpoint, but for the projections and the convolution: these are
    rows of the mixer's own.

    channels: how many queries and keys have together, which pass the convolution.
    """

    def __init__(self, config: Any, spec: dict[str, Any]):
        super().__init__()
        heads, per_group = spec["heads"], config.num_heads // config.n_groups
        groups = [head // per_group for head in heads]
        pairs = sorted(set(groups)) if spec["shared"] else groups
        of_head = [pairs.index(group) for group in groups] if spec["shared"] else list(range(len(groups)))
        self.width, self.pairs, self.time_step = spec["width"], len(pairs), bool(spec["time_step"])
        self.channels: int = 2 * self.pairs * self.width
        self.heads: Tensor
        self.pair_of_head: Tensor
        self.signs: Tensor
        self.register_buffer("heads", torch.tensor(heads), persistent=False)
        self.register_buffer("pair_of_head", torch.tensor(of_head), persistent=False)
        self.register_buffer("signs", torch.tensor(spec["signs"], dtype=torch.float32), persistent=False)
        self.log_tau = nn.Parameter(torch.zeros(len(heads)))
        self.gate = None if spec["blend"] is None else nn.Parameter(torch.zeros(len(heads)))

    def split(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """qk (tokens, channels) -> q and k (tokens, grafted heads, width), such that q . k is the score."""
        q, k = qk.view(len(qk), 2, self.pairs, self.width).unbind(1)
        sharpness = (self.signs * self.log_tau.float().exp())[:, None].to(q.dtype)
        return q[:, self.pair_of_head] * sharpness, k[:, self.pair_of_head]


class Mixer2(MambaMixer2):
    """vLLM's own, with prefix caching on a CPU as well.

    States to be kept are those at the ends of blocks. vLLM 0.32 takes them from within a piece of a prompt where the scan hands
    over the states of its chunks. That for CPUs hands over the last one alone, and vLLM fails with an IndexError. So nothing is
    promised there; the scheduler then ends a piece where a state is to be kept.
    """

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        spec: Any = super().get_kv_cache_spec(vllm_config)
        if not current_platform.is_cpu():
            return spec
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)


class HybridMixer2(Mixer2):
    """A Mamba-2 mixer some of whose heads are attention. The scan runs over all of them: vLLM's kernels know no gaps."""

    def __init__(self, config: Any, spec: dict[str, Any], vllm_config: VllmConfig, prefix: str):
        super().__init__(**mixer_arguments(config, vllm_config), prefix=prefix)
        graft = self.graft = ServedHeads(config, spec)
        self.config, self.each, self.attention_size = config, kv_heads(config), head_size(config)
        self.attend = nn.ModuleList(
            Attention(
                self.each, self.attention_size, 1.0, num_kv_heads=self.each, cache_config=vllm_config.cache_config,
                prefix=f"{prefix}.attend_{i}",
            )
            for i in range(len(spec["heads"]) // self.each)
        )  # fmt: skip
        state = self.groups_ssm_state_size
        self.sizes = [self.intermediate_size, state, state]  # of x, B and C
        self.in_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [self.intermediate_size, *self.sizes, graft.channels, self.num_heads],
            bias=config.use_bias, quant_config=vllm_config.quant_config, prefix=f"{prefix}.in_proj",
        )  # fmt: skip
        self.conv_dim += graft.channels
        self.tped_conv_size = self.conv_dim
        self.conv1d = MergedColumnParallelLinear(
            config.conv_kernel, [*self.sizes, graft.channels], bias=config.use_conv_bias, quant_config=None,
            prefix=f"{prefix}.conv1d",
        )  # fmt: skip
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
        heads = self.graft.heads
        x = channels[:tokens, : self.intermediate_size].view(tokens, self.num_heads, self.head_dim)[:, heads]
        qk = channels[:tokens, sum(self.sizes) :]
        dt = F.softplus(projected_states[:tokens, -self.num_heads :].float() + self.dt_bias.float())[:, heads]
        attended = self._attended(x, qk, dt)
        y = output[:tokens].view(tokens, self.num_heads, self.head_dim)
        if self.graft.gate is not None:
            scanned = y[:, heads].float()
            attended = scanned + (attended - scanned) * self.graft.gate.float()[:, None]
        y[:, heads] = attended.to(y.dtype)

    def _attended(self, x: Tensor, qk: Tensor, dt: Tensor) -> Tensor:
        """x (tokens, grafted heads, p), qk (tokens, channels), dt (tokens, grafted heads) -> (tokens, grafted heads, p) in
        float32, the D skip included."""
        graft, size, each = self.graft, self.attention_size, self.each
        q, k = graft.split(qk)
        v = x
        if graft.time_step:
            written = dt.clamp_min(TINY)[..., None]
            v = torch.cat([written * x.float(), written], dim=-1).to(x.dtype)
        q, k, v = (F.pad(m, (0, size - m.shape[-1])).unflatten(1, (-1, each)).flatten(2) for m in (q, k, v))
        y = torch.stack([attention(q[:, i], k[:, i], v[:, i]) for i, attention in enumerate(self.attend)], dim=1)
        y = y.view(len(x), -1, size).float()
        attended = y[..., : self.head_dim]
        if graft.time_step:
            attended = attended / y[..., self.head_dim : self.head_dim + 1]
        return attended * graft.signs[:, None] + self.D.float()[graft.heads][:, None] * x.float()

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return state_shape(self.config, self.graft.channels, self.num_spec)


def state_shape(config: Any, channels: int, speculated: int) -> tuple[tuple[int, ...], ...]:
    """Of what a mixer keeps of a request: its convolution's last inputs, `channels` of a graft's among them, and its state."""
    return MambaStateShapeCalculator.mamba2_state_shape(
        tp_world_size=1, intermediate_size=int(config.expand * config.hidden_size) + channels, n_groups=config.n_groups,
        num_heads=config.num_heads, head_dim=config.head_dim, state_size=config.state_size, conv_kernel=config.conv_kernel,
        num_spec=speculated,
    )  # fmt: skip


def convolved_channels(config: Any, spec: dict[str, Any]) -> int:
    """How many channels a graft adds to its mixer's convolution."""
    return 0 if is_layer_graft(spec) else ServedHeads(config, spec).channels


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
