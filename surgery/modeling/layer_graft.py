"""The layer graft: ordinary attention in the place of a layer's whole mixer, as in a Transformer's decoder layer.

With u the layer's normalised input, H heads of width d and G <= H key-value heads (head h reads key-value head h // (H / G)):

    q, k, v = q_proj u, k_proj u, v_proj u     then, where the base or a donor has them: a causal convolution over time, an RMS
                                               norm of every head's q and k, and RoPE, which turns both by the token's position
    y_t = o_proj [ sum_{s<=t} softmax_s(scale q_t . k_s) v_s ]_h

It stands behind the norm of the base's own block. An entry of a hybrid configuration's `grafts` is

{"kind": "layer", "layer": int, "num_heads": H, "num_key_value_heads": G, "head_dim": d, "scale": float,
 "rope": {"dim": int, "theta": float}, or {"inv_freq": [float, ...], "scaling": float}, or None,
 "qk_norm": epsilon or None, "conv": taps or 0, "bias": [names of the modules that have one]}

rope: dim: how many leading dimensions of a head turn; inv_freq: where the frequencies are not those of one theta; scaling: what
multiplies cosines and sines.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .graft import attend, constant, convolve
from .packing import Packing


class LayerGraft(nn.Module):
    """The projections of the attention, named as in a Transformer, for PEFT."""

    def __init__(self, hidden_size: int, entry: dict[str, Any]):
        super().__init__()
        bias, eps, taps = entry.get("bias", ()), entry.get("qk_norm"), entry.get("conv", 0)
        self.num_heads, self.num_key_value_heads = entry["num_heads"], entry["num_key_value_heads"]
        self.head_dim, self.scale = entry["head_dim"], entry["scale"]
        inner, shared = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        self.sizes = [inner, shared, shared]
        self.q_proj = nn.Linear(hidden_size, inner, bias="q_proj" in bias)
        self.k_proj = nn.Linear(hidden_size, shared, bias="k_proj" in bias)
        self.v_proj = nn.Linear(hidden_size, shared, bias="v_proj" in bias)
        self.o_proj = nn.Linear(inner, hidden_size, bias="o_proj" in bias)
        size = sum(self.sizes)
        self.qkv_conv = nn.Conv1d(size, size, taps, groups=size, bias="qkv_conv" in bias, padding=taps - 1) if taps else None
        self.q_norm, self.k_norm = (None if eps is None else LlamaRMSNorm(self.head_dim, eps=eps) for _ in range(2))
        rope, self.rope_scale = entry.get("rope"), 1.0
        self.inv_freq: tuple[float, ...] = ()  # radians per token of every pair of dimensions that turns
        if rope is not None and "theta" not in rope:
            self.inv_freq, self.rope_scale = tuple(rope["inv_freq"]), rope["scaling"]  # of cosines and sines
        elif rope is not None:
            steps = torch.arange(0, rope["dim"], 2, dtype=torch.float32, device="cpu") / rope["dim"]  # as in transformers
            self.inv_freq = tuple((1.0 / rope["theta"] ** steps).tolist())

    def project(
        self, hidden: Tensor, cache: Cache | None, place: int, mask: Tensor | None, packing: Packing | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (b, H, t, d), k and v (b, G, t, d), without positions."""
        qkv = torch.cat([proj(hidden) for proj in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        if self.qkv_conv is not None:
            qkv = convolve(qkv, self.qkv_conv, "identity", cache, place, mask, packing)
        q, k, v = (m.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for m in qkv.split(self.sizes, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q * self.scale, k, v

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (b, heads, t, d) with its leading dimensions turned by positions (b or 1, t), in halves: dimension i with i + dim /
        2."""
        half = len(self.inv_freq)
        angles = positions[:, None, :, None].float() * constant(self.inv_freq, x.device, torch.float32)
        cos, sin = ((turn * self.rope_scale).to(x.dtype) for turn in (angles.cos(), angles.sin()))
        first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class LayerGraftMixer(nn.Module):
    """What stands in the place of a block's mixer. replaced: the base's mixer, in a list, since it is no part of this module
    and is not saved with it; empty for a hybrid that was loaded from a folder. cache_place: as in graft.GraftMixer."""

    def __init__(self, hidden_size: int, entry: dict[str, Any], cache_place: int):
        super().__init__()
        self.layer_idx: int = entry["layer"]
        self.cache_place = cache_place
        self.graft = LayerGraft(hidden_size, entry)
        self.replaced: list[Any] = []
        self._enabled = True

    # As in any attention of transformers, for those who look for its heads.
    q_proj = property(lambda self: self.graft.q_proj)
    o_proj = out_proj = property(lambda self: self.graft.o_proj)
    head_dim = property(lambda self: self.graft.head_dim)
    num_heads = property(lambda self: self.graft.num_heads)

    @property
    def graft_enabled(self) -> bool:
        """Whether this is attention, or, while a hybrid's disable_grafts lasts, the mixer that it replaced."""
        return self._enabled

    @graft_enabled.setter
    def graft_enabled(self, value: bool) -> None:
        if not value and not self.replaced:
            raise ValueError("the folder of a hybrid does not hold what a layer graft replaced: load the base instead")
        self._enabled = value

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Cache | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        packing: Packing | None = None,
        **_: Any,
    ) -> Tensor:
        """As GraftMixer.forward."""
        cache = past_key_values if cache_params is None else cache_params
        if not self.graft_enabled:
            return self.replaced[0](hidden_states, cache_params=cache, attention_mask=attention_mask, packing=packing)
        graft, t = self.graft, hidden_states.shape[1]
        exist: Any = None if attention_mask is None else attention_mask.bool()  # which of the keys do, (b, s)
        q, k, v = graft.project(hidden_states, cache, self.cache_place, exist, packing)
        if cache is not None:
            new = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if exist is None else exist
            known = cache.update(new[:, None, :, None], new[:, None, :, None][..., :0], self.cache_place + 1)[0]
            exist = known[:, 0, :, 0]  # of a static cache also places that hold nothing: False
            if t > 1:
                exist = exist[:, : int(cache.get_seq_length(self.cache_place + 1))]
        if graft.inv_freq:
            if packing is not None:
                positions = packing.positions()
            elif exist is not None:
                positions = (exist.long().cumsum(-1) - 1).clamp_min(0)[:, -t:]
            else:
                positions = torch.arange(t, device=q.device)[None]
            q, k = graft.turn(q, positions), graft.turn(k, positions)
        if cache is not None:
            k, v = (m[:, :, : exist.shape[1]] for m in cache.update(k, v, self.cache_place))
        k, v = (m.repeat_interleave(graft.num_heads // graft.num_key_value_heads, dim=1) for m in (k, v))
        y = attend(q, k, v, mask=exist, packing=packing)[0]
        return graft.o_proj(y.transpose(1, 2).flatten(-2))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for mixer in self.replaced:  # it goes where the model goes
            mixer._apply(fn, recurse)
        return super()._apply(fn, recurse)
