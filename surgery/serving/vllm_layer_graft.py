"""vLLM's attention in the place of a whole mixer, with the donor's norms and MLP where they came along.

What is computed is in hybrids/layer_graft.py.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear

from surgery.serving.limits import head_size, kv_heads


class Linear(ReplicatedLinear):
    """One that gives the product alone, as torch's does."""

    def __init__(self, inputs: int, outputs: int, bias: bool, vllm_config: VllmConfig, prefix: str):
        super().__init__(inputs, outputs, bias=bias, quant_config=vllm_config.quant_config, prefix=prefix)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class ServedMLP(nn.Module):
    def __init__(self, hidden_size: int, spec: dict[str, Any], vllm_config: VllmConfig, prefix: str):
        super().__init__()
        inner, bias = spec["mlp"]["intermediate_size"], spec["bias"]

        def linear(name: str, inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, name in bias, vllm_config, f"{prefix}.{name}")

        self.gate_proj = linear("gate_proj", hidden_size, inner)
        self.up_proj = linear("up_proj", hidden_size, inner)
        self.down_proj = linear("down_proj", inner, hidden_size)
        self.act = get_act_fn(spec["mlp"]["hidden_act"])

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class ServedGraft(nn.Module):
    """The parameters, by their names in the checkpoint."""

    def __init__(self, config: Any, spec: dict[str, Any], vllm_config: VllmConfig, prefix: str):
        super().__init__()
        hidden, bias, eps, mlp = config.hidden_size, spec["bias"], spec["qk_norm"], spec["mlp"]
        inner, shared = (spec[name] * spec["head_dim"] for name in ("num_heads", "num_key_value_heads"))

        def linear(name: str, inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, name in bias, vllm_config, f"{prefix}.{name}")

        self.q_proj = linear("q_proj", hidden, inner)
        self.k_proj = linear("k_proj", hidden, shared)
        self.v_proj = linear("v_proj", hidden, shared)
        self.o_proj = linear("o_proj", inner, hidden)
        self.q_norm, self.k_norm = (None if eps is None else RMSNorm(spec["head_dim"], eps=eps) for _ in range(2))
        self.mlp = None if mlp is None else ServedMLP(hidden, spec, vllm_config, f"{prefix}.mlp")
        norms = (None if mlp is None else RMSNorm(hidden, eps=mlp["norm_eps"]) for _ in range(2))
        self.input_layernorm, self.post_attention_layernorm = norms


class ServedLayerGraft(nn.Module):
    def __init__(self, config: Any, spec: dict[str, Any], vllm_config: VllmConfig, prefix: str):
        super().__init__()
        self.graft = ServedGraft(config, spec, vllm_config, f"{prefix}.graft")
        self.head_dim, self.size, self.each = spec["head_dim"], head_size(config), kv_heads(config)
        self.queries = self.each * spec["num_heads"] // spec["num_key_value_heads"]  # heads of one of the attention layers
        self.attend = nn.ModuleList(
            Attention(
                self.queries, self.size, spec["scale"], num_kv_heads=self.each, cache_config=vllm_config.cache_config,
                prefix=f"{prefix}.attend_{i}",
            )
            for i in range(spec["num_key_value_heads"] // self.each)
        )  # fmt: skip
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.tensor(_frequencies(spec["rope"]), dtype=torch.float32), persistent=False)
        self.rope_scale = (spec["rope"] or {}).get("scaling", 1.0)

    whole = property(lambda self: self.graft.mlp is not None)
    input_layernorm = property(lambda self: self.graft.input_layernorm)
    post_attention_layernorm = property(lambda self: self.graft.post_attention_layernorm)
    mlp = property(lambda self: self.graft.mlp)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """positions (tokens,), hidden (tokens, hidden_size), normalised -> (tokens, hidden_size)."""
        graft = self.graft
        q, k, v = (proj(hidden).unflatten(-1, (-1, self.head_dim)) for proj in (graft.q_proj, graft.k_proj, graft.v_proj))
        if graft.q_norm is not None and graft.k_norm is not None:
            q, k = graft.q_norm(q.contiguous()), graft.k_norm(k.contiguous())
        if len(self.frequencies):
            q, k = self._turned(q, k, positions)
        q, k, v = (nn.functional.pad(m, (0, self.size - self.head_dim)) for m in (q, k, v))
        parts = []
        for i, attention in enumerate(self.attend):
            mine, keys = slice(i * self.queries, (i + 1) * self.queries), slice(i * self.each, (i + 1) * self.each)
            y = attention(q[:, mine].flatten(1), k[:, keys].flatten(1), v[:, keys].flatten(1))
            parts.append(y.view(-1, self.queries, self.size)[..., : self.head_dim])
        return graft.o_proj(torch.cat(parts, dim=1).flatten(1))

    def _turned(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE on the leading dimensions, in halves: dimension i turns with dimension i + dim / 2."""
        angles = positions[:, None, None].float() * self.frequencies
        cos, sin = ((turn * self.rope_scale).to(q.dtype) for turn in (angles.cos(), angles.sin()))
        half = len(self.frequencies)

        def turned(x: Tensor) -> Tensor:
            first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

        return turned(q), turned(k)


def _frequencies(rope: dict[str, Any] | None) -> list[float]:
    """Radians per token of every pair of dimensions that turns."""
    if rope is None:
        return []
    if "theta" not in rope:
        return rope["inv_freq"]
    steps = torch.arange(0, rope["dim"], 2, dtype=torch.float32, device="cpu") / rope["dim"]
    return (1.0 / rope["theta"] ** steps).tolist()
