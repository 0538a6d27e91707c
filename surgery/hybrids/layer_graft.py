"""The layer graft: ordinary attention instead of a layer's whole mixer, as in a Transformer's decoder layer.

With u the layer's normalised input, H heads of width d and G <= H key-value heads (head h reads key-value head h // (H / G)):

    q, k, v = q_proj u, k_proj u, v_proj u      then, where a donor has them: a causal convolution over time, an RMS norm of
                                                every head's q and k, and RoPE, which turns q and k by the token's position
    y_t = o_proj [ sum_{s<=t} softmax_s(scale q_t . k_s) v_s ]_h

Without the donor's MLP this is the mixer of the base's own block, behind the block's own norm. With it, the whole block is the
donor's, its norms included: h <- h + attention(norm h); h <- h + down_proj(act(gate_proj(norm h)) up_proj(norm h)).

Everything lies in `mixer.graft`, so that its tensors are told from the base's by name, as those of head grafts are. The base's
tensors of the layer are gone from the hybrid: its fingerprint is that of what is left, and the base's own is in the plan's
provenance. As long as the process lives, `mixer.removed` keeps them for unsplice.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.mamba2.modeling_mamba2 import apply_mask_to_padding_states

from surgery.hybrids.constants import Constant
from surgery.hybrids.parts import RMSNorm, convolved, fetching, gather_positions, normed, seen_keys
from surgery.hybrids.windows import AttentionWindow, existing, with_windows
from surgery.kernels.attention import graft_attention
from surgery.kernels.mixing import attention_matrix
from surgery.kernels.packing import Packing


def layer_spec(
    layer: int,
    num_heads: int,
    head_dim: int,
    *,
    num_key_value_heads: int | None = None,
    scale: float | None = None,
    rope: dict[str, Any] | None = None,
    qk_norm: float | None = None,
    conv: int = 0,
    mlp: dict[str, Any] | None = None,
    bias: Iterable[str] = (),
) -> dict[str, Any]:
    """The entry of a hybrid configuration's `grafts` for a layer graft.

    scale: of the scores, 1 / sqrt(head_dim) unless given. rope: {"dim": how many leading dimensions of a head turn, "theta":
    float}, or, where the frequencies are not those of one theta, {"inv_freq": [float, ...], "scaling": what multiplies cosines
    and sines}; None for no positions. qk_norm: epsilon of the norms of q and k, or None. conv: taps of the convolution of q, k
    and v, or 0. mlp: {"intermediate_size": int, "hidden_act": str, "norm_eps": float}, or None. bias: which modules have one.
    """
    return {
        "kind": "layer",
        "layer": layer,
        "num_heads": num_heads,
        "num_key_value_heads": num_heads if num_key_value_heads is None else num_key_value_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5 if scale is None else scale,
        "rope": rope,
        "qk_norm": qk_norm,
        "conv": conv,
        "mlp": mlp,
        "bias": sorted(bias),
    }


def is_layer_graft(spec: dict[str, Any]) -> bool:
    """Whether an entry of `grafts` is a layer's; those of the first exports do not say, and are heads'."""
    return spec.get("kind") == "layer"


def brings_only_layers(config: Any) -> bool:
    """Whether a model has no grafts but whole layers, which belong to a base that was trained with them: its other layers can
    be grafted, and its attention can have windows."""
    return all(map(is_layer_graft, getattr(config, "grafts", None) or ()))


class MLP(nn.Module):
    def __init__(self, hidden_size: int, spec: dict[str, Any], bias: list[str]):
        super().__init__()
        inner = spec["intermediate_size"]
        self.gate_proj = nn.Linear(hidden_size, inner, bias="gate_proj" in bias)
        self.up_proj = nn.Linear(hidden_size, inner, bias="up_proj" in bias)
        self.down_proj = nn.Linear(inner, hidden_size, bias="down_proj" in bias)
        self.act = ACT2FN[spec["hidden_act"]]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class LayerGraft(nn.Module):
    """The attention, and the donor's norms and MLP where they come with it. All is named as in a Transformer."""

    def __init__(self, hidden_size: int, spec: dict[str, Any]):
        super().__init__()
        bias, mlp = spec["bias"], spec["mlp"]
        self.layer_idx: int = spec["layer"]
        self.num_heads, self.num_key_value_heads = spec["num_heads"], spec["num_key_value_heads"]
        self.head_dim, self.scale = spec["head_dim"], spec["scale"]
        inner, shared = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, inner, bias="q_proj" in bias)
        self.k_proj = nn.Linear(hidden_size, shared, bias="k_proj" in bias)
        self.v_proj = nn.Linear(hidden_size, shared, bias="v_proj" in bias)
        self.o_proj = nn.Linear(inner, hidden_size, bias="o_proj" in bias)
        size, taps = inner + 2 * shared, spec["conv"]
        self.qkv_conv = nn.Conv1d(size, size, taps, groups=size, bias="qkv_conv" in bias, padding=taps - 1) if taps else None
        self.q_norm, self.k_norm = _norms(self.head_dim, spec["qk_norm"])
        # Numbers, not a buffer: nothing casts them to bfloat16, and no checkpoint holds them.
        self.inv_freq, self.rope_scale = _frequencies(spec["rope"])
        self._frequencies = Constant(self.inv_freq)
        self.mlp = None if mlp is None else MLP(hidden_size, mlp, bias)
        self.input_layernorm, self.post_attention_layernorm = _norms(hidden_size, None if mlp is None else mlp["norm_eps"])

    def project(
        self,
        hidden_states: Tensor,
        cache_params: Cache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """u (b, t, hidden) -> q (b, H, t, d), such that q . k is the score, k and v (b, G, t, d). Updates the cache's conv
        state. position_ids (b or 1, t): how far the tokens stand from their row's first; unless given, the cache tells."""
        sizes = [self.num_heads * self.head_dim] + 2 * [self.num_key_value_heads * self.head_dim]
        if self.qkv_conv is None:
            rows = [proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        else:
            rows = list(self._convolved(hidden_states, cache_params, attention_mask, packing).split(sizes, dim=-1))
        q, k, v = (row.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for row in rows)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.inv_freq:
            if position_ids is None:
                past = 0 if cache_params is None else int(cache_params.get_seq_length(self.layer_idx))
                position_ids = torch.arange(past, past + q.shape[2], device=q.device)[None]
            q, k = self._turned(q, k, position_ids)
        return q * self.scale, k, v

    def _convolved(
        self, hidden_states: Tensor, cache: Cache | None, attention_mask: Tensor | None, packing: Packing | None
    ) -> Tensor:
        assert self.qkv_conv is not None
        qkv = torch.cat([proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        qkv = apply_mask_to_padding_states(qkv, attention_mask)  # the first tokens of a padded row have nothing before them
        return convolved(qkv, self.qkv_conv.weight, self.qkv_conv.bias, cache, self.layer_idx, packing=packing)

    def _turned(self, q: Tensor, k: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE on the leading dimensions, in halves: dimension i turns with dimension i + dim / 2."""
        frequencies = self._frequencies.on(q, torch.float32)
        angles = position_ids.to(q.device)[:, None, :, None].float() * frequencies  # b 1 t dim/2
        cos, sin = ((turn * self.rope_scale).to(q.dtype) for turn in (angles.cos(), angles.sin()))
        half = len(frequencies)

        def turned(x: Tensor) -> Tensor:
            first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

        return turned(q), turned(k)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Packing | None) -> Tensor:
        """q (b, H, t, d), k and v (b, G, s, d), mask as graft_attention takes it -> (b, t, H, d)."""
        b, heads, t, width = q.shape
        each = heads // k.shape[1]
        if isinstance(mask, Packing) or t != 1 or not b or each == 1:
            return graft_attention(q, self.per_head(k), self.per_head(v), mask)
        # Decoding would spend its time copying keys. The queries of a group are as good as so many tokens, all of which may
        # attend to every key that exists.
        if mask is None:
            mask = torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool, device=k.device)
        mask = (mask if mask.dim() == 4 else mask[:, None, None]).expand(-1, 1, each, -1)
        y = graft_attention(q.view(b, -1, each, width), k, v, mask)  # b each G d
        return y.transpose(1, 2).reshape(b, 1, heads, width)

    def per_head(self, x: Tensor) -> Tensor:
        """k or v (b, G, s, d) -> (b, H, s, d): the kernels know no grouped queries."""
        return x.repeat_interleave(self.num_heads // self.num_key_value_heads, dim=1)


class LayerGraftBlock(GradientCheckpointingLayer):
    """What replaces a whole block: a donor's layer, its MLP and its norms included."""

    keeps_positions = True

    def __init__(self, config: Any, mixer: Any):
        super().__init__()
        self.residual_in_fp32 = getattr(config, "residual_in_fp32", False)
        self.mixer = mixer

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return self.mixer.block(hidden_states.to(torch.float32) if self.residual_in_fp32 else hidden_states, **kwargs)


def _norms(size: int, eps: float | None) -> tuple[RMSNorm | None, RMSNorm | None]:
    return (None, None) if eps is None else (RMSNorm(size, eps=eps), RMSNorm(size, eps=eps))


def _frequencies(rope: dict[str, Any] | None) -> tuple[list[float], float]:
    """Radians per token of every pair of dimensions that turns, and what multiplies cosines and sines."""
    if rope is None:
        return [], 1.0
    if "theta" not in rope:
        return rope["inv_freq"], rope["scaling"]
    steps = torch.arange(0, rope["dim"], 2, dtype=torch.float32, device="cpu") / rope["dim"]  # float32, as in transformers
    return (1.0 / rope["theta"] ** steps).tolist(), 1.0


class LayerGraftMixer(nn.Module):
    """What replaces a block's mixer. removed: the base's tensors that it replaces, by their names in the base;
    removed_modules: likewise its quantised modules, whose tensors mean nothing without them."""

    def __init__(self, config: Any, spec: dict[str, Any]):
        super().__init__()
        self.layer_idx: int = spec["layer"]
        self.graft = LayerGraft(config.hidden_size, spec)
        self.window: AttentionWindow | None = None  # of some heads (windows.py)
        self.removed: dict[str, Tensor] = {}
        self.removed_modules: dict[str, nn.Module] = {}

    # As in any attention of transformers, for those who look for its heads.
    q_proj = property(lambda self: self.graft.q_proj)
    o_proj = out_proj = property(lambda self: self.graft.o_proj)
    head_dim = property(lambda self: self.graft.head_dim)

    @fetching("graft.qkv_conv")
    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Cache | None = None,
        attention_mask: Tensor | None = None,
        causal_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        positions_to_keep: Tensor | None = None,
        packing: Packing | None = None,
        **_: Any,
    ) -> Tensor:
        """attention_mask (b, t): which of these tokens exist. causal_mask: as graft_attention takes it. packing: of the tokens,
        where several documents share a row; no causal mask then. position_ids (b or 1, t): unless given, tokens are counted
        from their row's or their document's first that exists."""
        if position_ids is None and packing is not None:
            position_ids = packing.positions()
        elif position_ids is None and causal_mask is not None and causal_mask.dim() == 2:
            position_ids = (causal_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -hidden_states.shape[1] :]
        q, k, v = self.graft.project(hidden_states, cache_params, attention_mask, position_ids, packing)
        if self.window is not None:
            y = self._with_window(self.window, q, k, v, packing or causal_mask, cache_params)
            return self.o_proj(gather_positions(positions_to_keep, y).flatten(-2))
        if cache_params is not None:
            k, v = seen_keys(cache_params, self.layer_idx, k, v)
        return self.o_proj(gather_positions(positions_to_keep, self.graft.attend(q, k, v, packing or causal_mask)).flatten(-2))

    def _with_window(
        self, window: AttentionWindow, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Packing | None, cache: Cache | None
    ) -> Tensor:
        """As graft.attend, with the window of some heads."""
        if isinstance(mask, Packing):

            def of_documents(*rows: Tensor) -> Tensor:
                q, k, v = (row.transpose(1, 2) for row in rows)
                return self._with_window(window, q, k, v, None, None)

            return mask.apply(of_documents, *(row.transpose(1, 2) for row in (q, k, v)))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        total = k.shape[2] if cache is None else int(cache.get_seq_length(self.layer_idx))
        return with_windows(
            window, q, k, v, existing(mask, total, len(q)),
            lambda q, k, v: self.graft.attend(q, k[:, :, :total], v[:, :, :total], mask),
        )  # fmt: skip

    def block(self, hidden_states: Tensor, positions_to_keep: Tensor | None = None, **kwargs: Any) -> Tensor:
        """The donor's whole layer, residuals included; they keep the dtype that they come in."""
        before, after, mlp = self.graft.input_layernorm, self.graft.post_attention_layernorm, self.graft.mlp
        assert before is not None
        assert after is not None
        assert mlp is not None
        mixed = self(normed(before, hidden_states), positions_to_keep=positions_to_keep, **kwargs)
        hidden_states = gather_positions(positions_to_keep, hidden_states) + mixed
        return hidden_states + mlp(normed(after, hidden_states))

    @fetching("graft.qkv_conv")
    def matrices(self, hidden_states: Tensor, rows: Tensor | None = None, heads: Sequence[int] | None = None) -> Tensor:
        """The attention of `heads` (of all, unless given) for one sequence (1, t, hidden): (heads, rows, t)."""
        q, k, _ = self.graft.project(hidden_states)
        k = self.graft.per_head(k)
        if heads is not None:
            q, k = q[:, list(heads)], k[:, list(heads)]
        matrices = attention_matrix(q, k, rows=rows)[0]
        return matrices if self.window is None else self._cut(matrices, rows, heads)

    def _cut(self, matrices: Tensor, rows: Tensor | None, heads: Sequence[int] | None) -> Tensor:
        """Matrices (heads, rows, t) as the window of some heads leaves them."""
        assert self.window is not None
        t, each = matrices.shape[-1], self.graft.num_heads // self.graft.num_key_value_heads
        numbers = torch.arange(t, device=matrices.device)
        at = (numbers if rows is None else rows.to(numbers.device))[:, None]
        read = (numbers > at - self.window.length) | (numbers < self.window.first)
        cut = torch.tensor([head // each in self.window.groups for head in (heads or range(self.graft.num_heads))])
        left = matrices.masked_fill(~read & cut.to(matrices.device)[:, None, None], 0)
        return left / left.sum(-1, keepdim=True)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # The base's tensors are shared with it: they go where the others go, or the base would be left in two places.
        for tensor in self.removed.values():
            tensor.data = fn(tensor.data)
        return super()._apply(fn, recurse)
