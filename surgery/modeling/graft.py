"""What the mixers of all hybrids share: three steps, the graft between the second and the third, and room for its keys in a
cache.

    streams = mixer.project(hidden, ...)     what every head reads and writes
    y = mixer.scan(streams, ...)             every head's own output, skip included
    out = mixer.finish(y, streams.gate)      norm, gate and output projection

A grafted head h looks up the values x of earlier tokens by attention with queries and keys of its own, beside a null key with
a learned logit and no value (docs/derivations.md):

    p = softmax([sigma tau q_t . k_s + log_write_s, b + w . sigma tau q_t]),   m_t = 1 - p_null
    y_t <- (1 - g m_t) y_t + g (sigma sum_s p_ts x_s + m_t D x_t)

g is learned. m_t is the share of the softmax that the null key leaves: where nothing in the context matches, m_t is about 0,
and the head stays as the base has it. w is 0 unless the plan says otherwise. In inference, m_t below `closed_below` counts as
0, and y_t is untouched, bit for bit. A graft without a null key has m = 1, as all had up to version 0.30; one without a gate
has g = 1 as well.

An entry of a hybrid configuration's `grafts` is

{"kind": "head", "layer": int, "heads": [int, ...], "signs": [1 or -1, ...], "width": int, "time_step": bool, "gated": bool,
 "null": bool, "null_query": bool, "closed_below": float, "pairs": [[int, ...], ...] (ChannelGraft only)}

heads: sorted; signs: sigma, one a query-key pair; width: of queries and keys; time_step: whether log_write is added to the
scores.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.activations import ACT2FN
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    StaticLayer,
)
from transformers.utils import is_tracing

from .packing import Packing
from .reference import at_least_float32

try:
    from surgery.kernels.attention import attend
    from surgery.kernels.conv import causal_conv
except ImportError:
    from .reference import attend, causal_conv  # type: ignore[assignment]

SILU = ("silu", "swish")  # what configurations call that activation
SMALLEST = 1e-30  # of a write strength, which has a logarithm and may divide: softplus reaches 0, in float32 too
NATS = 20.0  # b = NATS * null: scores span tens of nats, and Adam moves a parameter by about its learning rate a step
ABSENT = -500.0  # `null` of a head without a null key in a layer where others have one: b is -10,000 nats
WENT = {
    "shared": "query-key pairs that several heads share",
    "direct": "heads from a donor",
    "own_values": "copying heads",
    "mlp": "a donor's MLP",
}


@dataclass(eq=False)
class Streams:
    """What a mixer makes of its input (b, t, d) for each of h heads.

    x (b, t, h, p): what is written. k and q (b, t, g, n): what it is written and read with, each for h / g heads. gate: what
    `finish` takes. write (b, t, h): how strongly each token is written, in float32 at least (the time step, beta), or None.
    decay: what else the scan needs, if anything.
    """

    x: Tensor
    k: Tensor
    q: Tensor
    gate: Tensor
    write: Tensor | None = None
    decay: Tensor | None = None

    @property
    def log_write(self) -> Tensor | None:
        """What is added to the scores of a key, (b, t, h), or None."""
        return None if self.write is None else self.write.clamp_min(SMALLEST).log()


class Graft(nn.Module):
    """The attention of a layer's grafted heads, with a query-key pair each. Its projections are named as in a Transformer, for
    PEFT.

    gate: g, one a head, or None for 1. null: b / NATS, one a pair, or None for no null key. null_query: w (pairs, width), or
    None for 0. attend: kernels/attention.py: attend, or what else takes its place. watch: if it is set, it is called with the
    graft and m (b, t, heads) of every forward, as it acts: closed shares are 0.
    """

    def __init__(self, mixer: Any, entry: dict[str, Any]):
        super().__init__()
        self.heads: list[int] = list(entry["heads"])
        self.signs: list[int] = list(entry["signs"])
        self.width: int = entry["width"]
        self.time_step: bool = entry["time_step"]
        self.closed_below: float = entry.get("closed_below", 0.0)
        self.attend: Callable[..., tuple[Tensor, Tensor]] = attend
        self.watch: Callable[[Graft, Tensor], None] | None = None
        pairs = len(entry.get("pairs") or self.heads)
        if len(self.signs) != pairs or self.width < 1 or not self.heads:
            raise ValueError(f"a graft of layer {entry['layer']} has {len(self.heads)} heads and {len(self.signs)} signs")
        self.make_projections(mixer, pairs * self.width)
        self.log_tau = nn.Parameter(torch.zeros(pairs))
        gated = entry.get("gated", entry.get("blend") is not None)
        self.gate = nn.Parameter(torch.ones(len(self.heads))) if gated else None
        self.null = nn.Parameter(torch.zeros(pairs)) if entry.get("null") else None
        self.null_query = nn.Parameter(torch.zeros(pairs, self.width)) if entry.get("null_query") else None

    def make_projections(self, mixer: Any, size: int) -> None:
        """Modules that make queries and keys of `size` channels in all."""
        self.q_proj = nn.Linear(mixer.hidden_size, size, bias=mixer.projection_bias)
        self.k_proj = nn.Linear(mixer.hidden_size, size, bias=mixer.projection_bias)
        taps, bias = mixer.conv1d.kernel_size[0], mixer.conv1d.bias is not None
        self.qk_conv = nn.Conv1d(2 * size, 2 * size, taps, groups=2 * size, bias=bias, padding=taps - 1)

    def queries_and_keys(
        self, mixer: Any, hidden: Tensor, streams: Streams, cache: Cache | None, mask: Tensor | None, packing: Packing | None
    ) -> tuple[Tensor, Tensor]:
        """q and k (b, pairs, t, width), such that q . k is the score, sign and scale included."""
        hidden = hidden.to(self.q_proj.weight.dtype) if is_plain(self.q_proj.weight) else hidden
        qk = torch.cat([self.q_proj(hidden), self.k_proj(hidden)], dim=-1)
        # Apart from the base's convolution, which has the same shape with a graft and without.
        qk = convolve(qk, self.qk_conv, mixer.activation, cache, mixer.cache_place, mask, packing)
        return self.sharpen(*mixer.prepare(*qk.unflatten(-1, (2, len(self.signs), self.width)).unbind(2)))

    def sharpen(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k (b, t, pairs, width) -> (b, pairs, t, width): q times sigma tau, and k - w. A null logit b beside the keys
        k - w is the same as b + w . q beside the keys k."""
        k = k if self.null_query is None else k - self.null_query.to(k.dtype)
        scale = constant(tuple(self.signs), q.device, self.log_tau.dtype) * self.log_tau.exp()
        return (q * scale[:, None].to(q.dtype)).transpose(1, 2), k.transpose(1, 2)

    def forward(
        self,
        owner: Callable[[], Any],
        hidden: Tensor,
        streams: Streams,
        y: Tensor,
        cache: Cache | None = None,
        mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """All heads' output (b, t, h, p), with the graft in it, from their own. owner: gives the mixer. hidden (b, t, d): its
        input; mask (b, t) bool: which of these tokens exist."""
        mixer = owner()
        q, k = self.queries_and_keys(mixer, hidden, streams, cache, mask, packing)
        x, own = take(streams.x, self.heads, 2), take(y, self.heads, 2)
        v, bias = self.values(x, streams)
        dtype = torch.promote_types(k.dtype, v.dtype)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if cache is not None:  # on the keys of these tokens and of those that it remembers
            k, v, bias = remember(cache, mixer.cache_place, k, v, bias, mask)
            mask = None  # it is in the bias
        null = None if self.null is None else NATS * at_least_float32(self.null)
        found, m = self.read(*self.attend(q, k, v, bias, null, mask, packing))
        D = getattr(mixer, "D", None)
        skip = 0 if D is None else take(D, self.heads, 0)[:, None] * x
        if self.gate is None and self.null is None:
            new = found + skip
        else:
            gate = 1.0 if self.gate is None else at_least_float32(self.gate)[:, None]
            new = own + gate * (found + m[..., None] * (skip - own))
        new = new.to(y.dtype)
        if self.closed_below > 0 and not self.training:
            is_open = m >= self.closed_below
            new, m = torch.where(is_open[..., None], new, own), m * is_open
        if self.watch is not None:
            self.watch(self, m)
        # Into a copy with the strides of y, which index_copy would not make: a projection of the same numbers in another order
        # of memory may round in another way, and where the graft is closed not a bit is to change.
        return y.clone().index_copy_(2, constant(tuple(self.heads), y.device, torch.long), new)

    def values(self, x: Tensor, streams: Streams) -> tuple[Tensor, Tensor | None]:
        """What is attended to, (b, pairs, t, values), of x (b, t, heads, p); and what is added to the scores (b, pairs, t)."""
        bias = None
        if self.time_step and streams.write is not None:
            bias = take(streams.write, self.heads, 2).clamp_min(SMALLEST).log().transpose(1, 2)
        return x.transpose(1, 2), bias

    def read(self, found: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        """sigma sum_s p_ts x_s (b, t, heads, p) and m (b, t, heads), from what the attention gives."""
        signs = constant(tuple(self.signs), found.device, found.dtype)
        return found.transpose(1, 2) * signs[:, None], m.transpose(1, 2)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, signs={self.signs}"


class ChannelGraft(Graft):
    """The attention of a set of Mamba-1's channels: those that start alike share a query-key pair, and only the time step dt of
    what they look up is their own. The scores know the largest of them, d_s, and r_sc = dt_sc / d_s leaves them as a quotient
    of two sums that share them (docs/derivations.md):

        w_tc = sum_s p_ts r_sc,   m_tc = w_tc / (w_tc + p_null),   attention_tc = sum_s p_ts r_sc x_sc / (w_tc + p_null)

    pairs: for every query-key pair, the places in `heads` of the channels that it serves.
    """

    def __init__(self, mixer: Any, entry: dict[str, Any]):
        super().__init__(mixer, entry)
        self.pairs: list[list[int]] = entry["pairs"]
        self.each = max(map(len, self.pairs))  # the value width: smaller sets are padded with zeros
        flat = [place for places in self.pairs for place in places]
        if sorted(flat) != list(range(len(self.heads))):
            raise ValueError(f"the pairs of layer {entry['layer']}'s graft have to serve each of its channels once")
        self.by_place = sorted(range(len(flat)), key=flat.__getitem__)

    def make_projections(self, mixer: Any, size: int) -> None:
        self.q_proj = nn.Linear(mixer.intermediate_size, size, bias=False)
        self.k_proj = nn.Linear(mixer.intermediate_size, size, bias=False)

    def queries_and_keys(
        self, mixer: Any, hidden: Tensor, streams: Streams, cache: Cache | None, mask: Tensor | None, packing: Packing | None
    ) -> tuple[Tensor, Tensor]:
        """q and k (b, pairs, t, width), such that q . k is the score, from x behind the base's convolution, as Mamba-1 makes C
        and B."""
        x = streams.x[..., 0]
        x = x.to(self.q_proj.weight.dtype) if is_plain(self.q_proj.weight) else x
        q, k = (proj(x).unflatten(-1, (len(self.pairs), self.width)) for proj in (self.q_proj, self.k_proj))
        return self.sharpen(*mixer.prepare(q, k))

    def values(self, x: Tensor, streams: Streams) -> tuple[Tensor, Tensor | None]:
        if not self.time_step:
            return self.by_pair(x[..., 0]), None
        assert streams.write is not None  # in float32: float16 has no room for time steps, and many would be divided by 0
        write = self.by_pair(take(streams.write, self.heads, 2).clamp_min(SMALLEST))
        largest = write.detach().amax(-1, keepdim=True)  # nothing depends on it but rounding
        write = write / largest
        return torch.cat([write * self.by_pair(x[..., 0]), write], dim=-1), largest[..., 0].log()

    def read(self, found: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        if not self.time_step:
            m = m[..., None].expand_as(found)
        else:
            found, w = found.split(self.each, dim=-1)
            total = (w + (1 - m).clamp_min(0)[..., None]).clamp_min(SMALLEST)
            found, m = found / total, w / total if self.null is not None else torch.ones_like(w)
        signs = constant(tuple(self.signs), found.device, found.dtype)
        return self.by_channel(found * signs[:, None, None])[..., None], self.by_channel(m)

    def by_pair(self, m: Tensor) -> Tensor:
        """m (b, t, grafted channels) -> (b, pairs, t, each)."""
        rows = [F.pad(take(m, places, 2), (0, self.each - len(places))) for places in self.pairs]
        return torch.stack(rows, dim=1)

    def by_channel(self, v: Tensor) -> Tensor:
        """v (b, pairs, t, each) -> (b, t, grafted channels), the inverse of by_pair."""
        rows = [v[:, i, :, : len(places)] for i, places in enumerate(self.pairs)]
        return take(torch.cat(rows, dim=-1), self.by_place, 2)


def what_went(entry: dict[str, Any]) -> str | None:
    """What a graft's entry has that only versions up to 0.30 had, or None."""
    if (kind := entry.get("kind", "head")) not in ("head", "layer"):
        return f"a graft of kind '{kind}'"
    if entry.get("whole_state") is not None:
        return "a smaller state"
    return next((what for name, what in WENT.items() if entry.get(name)), None)


@contextmanager
def watched(grafts: Iterable[Graft], watch: Callable[[Graft, Tensor], None]) -> Iterator[None]:
    """While this lasts, `watch` sees the open shares of every forward of these grafts (Graft.watch)."""
    grafts = list(grafts)
    for graft in grafts:
        graft.watch = watch
    try:
        yield
    finally:
        for graft in grafts:
            graft.watch = None


class GraftMixer:
    """A mixin before a mixer of transformers, or before nn.Module, of which it reads: num_heads, head_dim, n_groups,
    ssm_state_size, hidden_size, layer_idx, activation, and in_proj, conv1d and D where there are such.

    A subclass has the three steps, and says where a graft begins:

    - project(hidden (b, t, d), cache, mask, packing) -> Streams. mask (b, t) bool: which of these tokens exist. Updates the
      cache's state of the convolution.
    - scan(streams, cache, packing) -> (b, t, h, p): the recurrence of all heads, a skip included. Updates the cache's state.
    - finish(y (b, t, h, p), gate) -> (b, t, d): norm, gate and output projection.
    - query_key_rows(make) -> what a graft's queries ("q") and keys ("k") start from: weight (groups, n, inputs) and bias
      (groups, n) of what projects them, weight (groups, n, 1, taps) and bias of their convolution; None for what there is not.
      make: gives the weight of a module in floating point.

    tap: if it is set, called as tap(mixer, streams, y, packing) between scan and graft; what it returns takes the place of y
    (b, t, h, p). graft_enabled: HybridLanguageModel.disable_grafts clears it.
    """

    graft_class: type[Graft] = Graft
    has_time_step = True  # whether the base writes with a strength that the scores of a graft are to know
    widens = True  # whether queries and keys of a graft may be wider than the base's

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.graft: Graft | None = None
        self.graft_enabled = True
        self.cache_place = -1
        self.tap: Callable[[Any, Streams, Tensor, Packing | None], Tensor] | None = None

    @property
    def projection_bias(self: Any) -> bool:
        """Whether what makes queries and keys has a bias."""
        return self.in_proj.bias is not None

    def put_graft(self: Any, entry: dict[str, Any], cache_place: int) -> None:
        """Make room for the graft that an entry of the configuration describes. Its keys are at cache_place in a cache."""
        if self.graft is not None:
            raise ValueError(f"layer {entry['layer']} is grafted twice")
        if max(entry["heads"]) >= self.num_heads:
            raise ValueError(
                f"layer {entry['layer']} has heads 0 to {self.num_heads - 1}, and its graft names {entry['heads']}"
            )
        self.graft, self.cache_place = self.graft_class(self, entry), cache_place

    def enter(self, hidden: Tensor) -> Tensor:
        """What the base does to a mixer's input (b, t, d) first; nothing, unless a subclass says so."""
        return hidden

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What the base does to queries and keys (b, t, pairs, width) before they meet; nothing, unless a subclass says so."""
        return q, k

    def forward(
        self: Any,
        hidden_states: Tensor,
        cache_params: Cache | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        packing: Packing | None = None,
        **_: Any,
    ) -> Tensor:
        """(b, t, d) -> (b, t, d). attention_mask (b, t): which of these tokens exist. past_key_values: cache_params' other
        name."""
        cache = past_key_values if cache_params is None else cache_params
        mask = None if attention_mask is None else attention_mask.bool()
        hidden_states = self.enter(hidden_states)
        streams = self.project(hidden_states, cache, mask, packing)
        y = self.scan(streams, cache, packing)
        if self.tap is not None:
            y = self.tap(self, streams, y, packing)
        if self.graft is not None and self.graft_enabled:
            # Not the mixer itself: accelerate moves every module that an offloaded one is given.
            y = self.graft(lambda: self, hidden_states, streams, y, cache, mask, packing)
        return self.finish(y, streams.gate)


def convolve(
    x: Tensor,
    conv: Any,
    activation: str,
    cache: Cache | None,
    place: int,
    mask: Tensor | None,
    packing: Packing | None,
) -> Tensor:
    """x (b, t, c) behind its short causal convolution (an nn.Conv1d) and activation, 0 on padding before and after.

    What the cache holds at `place` of earlier tokens stands before x; then it holds each row's last tokens that exist. Padding
    may be anywhere in a row, since the convolution reads the tokens that exist first, side by side.
    """
    hook = getattr(conv, "_hf_hook", None)  # accelerate fetches the weights of a module that is called, and this one is not
    if hook is not None:
        hook.pre_forward(conv)
    t, silu = x.shape[1], activation in SILU
    order = None
    if mask is not None:
        x = x.masked_fill(~mask[..., None], 0)
        # Whether a token comes after padding; a GPU is not asked, since the host would wait for it.
        if x.device.type != "cpu" or is_tracing(x) or (mask[:, 1:] > mask[:, :-1]).any():
            order = mask.int().argsort(dim=1, descending=True, stable=True)[..., None].expand_as(x)
            x = x.gather(1, order)
    if cache is not None:
        taps = conv.kernel_size[0]
        x = cache.update_conv_state(x.transpose(1, 2), place, conv_kernel_size=taps).transpose(1, 2)
        if mask is not None:
            at = (x.shape[1] - t + mask.sum(-1))[:, None] + torch.arange(-taps, 0, device=x.device)
            window = x.gather(1, at.clamp_min(0)[..., None].expand(-1, -1, x.shape[2])).masked_fill((at < 0)[..., None], 0)
            state: Any = cache.get_conv_state(place)
            state.copy_(window.transpose(1, 2))
    y = causal_conv(x, conv.weight, conv.bias, t, silu, packing=packing)
    if hook is not None:
        hook.post_forward(conv, None)
    if not silu and activation != "identity":
        y = ACT2FN[activation](y)
    y = y if order is None else torch.zeros_like(y).scatter(1, order, y)
    return y if mask is None else y.masked_fill(~mask[..., None], 0)


def make_room(cache: Cache, layers: int, grafts: int, length: int | None = None) -> None:
    """Let the cache of a model with so many layers have two more for each graft: one for its keys, values and convolution, and
    one for what is added to the scores of these keys. As layers of the cache they are reordered and moved as all others are.
    length: of a static cache that has no keys of its own, which does not know it. Raises ValueError for a cache that was made
    for another model."""
    if len(cache.layers) not in (layers, layers + 2 * grafts):
        raise ValueError(
            f"the cache has {len(cache.layers)} layers and the model {layers}: use DynamicCache(config=model.config)"
        )
    if len(cache.layers) > layers:
        return
    length = next((layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)), length)
    for _ in range(grafts):
        if length is None:
            cache.layers += [LinearAttentionAndFullAttentionLayer(), DynamicLayer()]
        else:
            cache.layers += [LinearAttentionAndStaticFullAttentionLayer(length), StaticLayer(length)]


def remember(
    cache: Cache, place: int, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and what is added to the scores of the past and of these tokens, which the cache then holds. bias (b, heads,
    t), or None for 0; where the mask (b, t) is False, no token exists, and it is -inf."""
    bias = k.new_zeros(len(k), 1, k.shape[2], dtype=torch.promote_types(k.dtype, torch.float32)) if bias is None else bias
    bias = bias if mask is None else bias.masked_fill(~mask[:, None], -torch.inf)
    t, layer = k.shape[2], cache.layers[place]
    k, v = cache.update(k, v, place)
    bias, _ = cache.update(bias[..., None], bias[..., None][..., :0], place + 1)
    bias = bias[..., 0]
    if not isinstance(layer, StaticLayer):
        return k, v, bias
    # It is longer than what it holds. How much that is only the device knows, and in decoding the host does not wait for it.
    if t == 1:
        return k, v, bias.masked_fill(torch.arange(k.shape[2], device=k.device) >= layer.cumulative_length, -torch.inf)
    length = int(layer.cumulative_length)
    return k[:, :, :length], v[:, :, :length], bias[:, :, :length]


def take(x: Tensor, places: Sequence[int], dim: int) -> Tensor:
    """x at these places along `dim`."""
    first, number = places[0], len(places)
    if list(places) == list(range(first, first + number)):
        return x.narrow(dim, first, number)
    return x.index_select(dim, constant(tuple(places), x.device, torch.long))


def constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers as a vector, copied to a device once and not in every step of decoding."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return torch.tensor(values, device=device, dtype=dtype)
    return _constant(values, device, dtype)


@lru_cache(maxsize=1024)
def _constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # it may be saved for a backward pass later
        return torch.tensor(values, device=device, dtype=dtype)


def is_plain(weight: Tensor) -> bool:
    """Whether a weight is what its module multiplies by: not integers, and not float8 beside its scales."""
    return weight.is_floating_point() and weight.itemsize >= 2
