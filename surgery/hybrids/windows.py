"""Windows: attention heads that read the first tokens of a row and the latest ones, and keep no others (DuoAttention, arXiv
2410.10819).

A head with a window of w tokens reads, at position t, the keys s with t - w < s <= t, and those of the first f tokens of its
row that exist. That is a mask; what makes it worth having is that all other keys can be forgotten. Heads that share keys have
their window together. Keys stay turned by their own positions, so from a cache the same is computed as without one.

It is the stock model's own attention, by three of transformers' interfaces, and no family's code is written again:

    WindowedAttention   a mixin before the class of a stock attention, which has it choose `attend` as its attention function
    WindowedLayer       a mixin before the class of a cache's layer: it keeps all keys of the other heads, as that layer does,
                        and of those with a window the first and the latest ones
    attend              asks the stock function for the other heads, and computes those with a window itself

A layer graft (layer_graft.py) calls `with_windows` itself.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import new_class
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from surgery.hybrids.patching import become

BLOCK = 256  # queries that are computed together: of no prompt are all scores stored at once
# Of `attend` among the attention functions of a process. An export brings its own copy of this file, and both may be there.
NAME = f"mamba_surgery_windows of {__name__}"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class AttentionWindow:
    """groups: the key-value heads that have it. first: how many of the first tokens they read. length: and how many of the
    latest ones, the token itself among them."""

    groups: tuple[int, ...]
    first: int
    length: int

    @property
    def most(self) -> int:
        """How many tokens a cache keeps at most."""
        return self.first + self.length - 1


def is_window(spec: dict[str, Any]) -> bool:
    """Whether an entry of a configuration's `grafts` is a window."""
    return spec.get("kind") == "window"


def window_spec(layer: int, groups: Sequence[int], first: int, length: int) -> dict[str, Any]:
    """The entry of a hybrid configuration's `grafts` for the windows of a layer's attention; as in AttentionWindow."""
    return {"kind": "window", "layer": layer, "groups": sorted(groups), "first": first, "length": length}


def window_of(spec: dict[str, Any]) -> AttentionWindow:
    return AttentionWindow(tuple(spec["groups"]), spec["first"], spec["length"])


def attention_in(block: nn.Module, mixer: type, config: Any) -> Any:
    """The stock attention of a block, whose heads can have windows. mixer: the class of what mixes otherwise. Raises
    ValueError, which says why, where there is none."""
    parts = [part for part in block.modules() if hasattr(part, "o_proj") and not isinstance(part, mixer)]
    if not parts:
        raise ValueError("it has no attention")
    name, part = type(parts[0]).__name__, parts[0]
    if not all(hasattr(part, projection) for projection in PROJECTIONS):
        raise ValueError(f"{name} keeps one compressed key for all heads (MLA), so that no head's own can be forgotten")
    if hasattr(part, "indexer"):
        raise ValueError(f"{name} chooses keys by an index, which reads all of them")
    if getattr(config, "sliding_window", None) is not None:
        raise ValueError(f"{name} has a window for all heads already (sliding_window)")
    return part


def give_window(attention: Any, layer: int, window: AttentionWindow) -> None:
    """Let a stock attention have a window where it is used in this layer; Zamba2's is used in several."""
    if not isinstance(attention, WindowedAttention):
        become(attention, before(WindowedAttention, type(attention)))
        attention.windows = {}
    attention.windows[layer] = window


class _Choosing:
    """A configuration that chooses `attend`, and else says what the model's says."""

    _attn_implementation = NAME

    def __init__(self, config: Any):
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class WindowedAttention:
    """A mixin before a stock attention. windows: by layer."""

    windows: dict[int, AttentionWindow]
    layer_idx: int
    config: Any = property(lambda self: _Choosing(vars(self)["config"]))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock one."""
        stock: Any = super()
        named = dict(zip(inspect.signature(stock.forward).parameters, args, strict=False)) | kwargs
        layer = named.get("layer_idx", self.layer_idx)
        window = self.windows.get(layer)
        if window is not None and (kept := named.get("past_key_values")) is not None:
            keep_window(kept, layer, window)
        return stock.forward(**named, window=window)


def before(ours: type, stock: type, **fields: Any) -> Any:
    """The class of ours before a stock one, the same every time."""
    if (ours, stock) not in _MADE:
        name = f"Windowed{stock.__name__}"
        _MADE[ours, stock] = new_class(name, (ours, stock), exec_body=lambda namespace: namespace.update(fields))
    return _MADE[ours, stock]


_MADE: dict[tuple[type, type], type] = {}


def keep_window(kept: Cache, place: int, window: AttentionWindow) -> None:
    """Let a layer of a cache keep no more than that of some heads. Raises ValueError where it holds keys already."""
    layer: Any = kept.layers[place]
    if isinstance(layer, WindowedLayer):
        return
    if int(layer.get_seq_length()):
        raise ValueError("this cache was filled by a model without windows; begin with an empty one")
    if getattr(layer, "is_sliding", False):
        raise ValueError(f"a {type(layer).__name__} has a window of its own; let the model make its cache")
    # Its layout forbids a change of class. No type of transformers' own; and not to be compiled, as the window moves.
    windowed: Any = object.__new__(before(WindowedLayer, type(layer), _layer_type=None, is_compileable=False))
    vars(windowed).update(vars(layer), window=window)
    kept.layers[place] = windowed
    windowed.forget()


class Halves(NamedTuple):
    """Keys, or values, as WindowedLayer hands them to `attend`: those of the heads without a window, and the layer itself."""

    full: Tensor
    layer: "WindowedLayer"


class WindowedLayer:
    """A mixin before a layer of a cache. keys, values: of the heads without a window. recent_keys, recent_values (b, groups, n,
    d): of those with one, of the latest tokens. first_keys, first_values (b, groups, f, d): of the first ones, once some of
    those before `recent` were forgotten. seen: tokens so far."""

    OWN = ("recent_keys", "recent_values", "first_keys", "first_values")
    window: AttentionWindow
    seen: int
    recent_keys: Tensor | None
    recent_values: Tensor | None
    first_keys: Tensor | None
    first_values: Tensor | None

    def forget(self) -> None:
        self.seen = 0
        for name in self.OWN:
            setattr(self, name, None)

    def own(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change all tensors of the heads with a window."""
        for name in self.OWN:
            if (tensor := getattr(self, name)) is not None:
                setattr(self, name, change(tensor))

    def update(self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Halves, Halves]:
        """keys (b, groups, t, d). All of the new ones are there until `attend` has read them (trim)."""
        groups = [*self.window.groups]
        others = [group for group in range(keys.shape[1]) if group not in groups]
        full = super().update(keys[:, others], values[:, others], *args, **kwargs)  # type: ignore[misc]
        new = keys[:, groups], values[:, groups]
        if self.recent_keys is not None:
            new = torch.cat([self.recent_keys, new[0]], 2), torch.cat([self.recent_values, new[1]], 2)
        self.recent_keys, self.recent_values = new
        self.seen += keys.shape[2]
        return Halves(full[0], self), Halves(full[1], self)

    def trim(self, first: tuple[Tensor, Tensor]) -> None:
        """Forget what no later token reads. first: keys and values of the first tokens."""
        assert self.recent_keys is not None
        assert self.recent_values is not None
        if self.seen > self.window.most:
            self.first_keys, self.first_values = first
            self.recent_keys = self.recent_keys[:, :, 1 - self.window.length :].clone()  # a view would keep all of them
            self.recent_values = self.recent_values[:, :, 1 - self.window.length :].clone()

    def get_seq_length(self) -> int:
        return self.seen

    def reset(self: Any) -> None:
        super().reset()  # type: ignore[misc]
        self.forget()

    def reorder_cache(self: Any, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.own(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self: Any, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.own(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self: Any, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.own(lambda tensor: tensor[indices])

    def offload(self: Any) -> None:
        super().offload()  # type: ignore[misc]
        self.own(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self: Any) -> None:
        super().prefetch()  # type: ignore[misc]
        if self.is_initialized:
            self.own(lambda tensor: tensor.to(self.device, non_blocking=True))

    def crop(self: Any, tokens_to_remove: int) -> None:
        """As in transformers. Raises ValueError where keys were forgotten that would be in the window again."""
        if self.first_keys is not None and tokens_to_remove:
            raise ValueError("a cache with windows has forgotten what was before them, and cannot be cropped")
        before = int(super().get_seq_length())  # type: ignore[misc]
        super().crop(tokens_to_remove)  # type: ignore[misc]
        if tokens_to_remove and before:
            self.own(lambda tensor: tensor[:, :, : -abs(tokens_to_remove)])
            self.seen -= abs(tokens_to_remove)


def attend(
    module: Any, query: Tensor, key: Tensor | Halves, value: Tensor | Halves, attention_mask: Any, *,
    window: AttentionWindow | None = None, scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function as transformers has them, of a WindowedAttention. query (b, heads, t, d), key and value as its
    cache gives them, or (b, groups, t, d); attention_mask: as the stock function takes it -> (b, t, heads, d), no weights."""
    own = ALL_ATTENTION_FUNCTIONS.get_interface(vars(module)["config"]._attn_implementation, _eager_of(module))
    options = {"scaling": scaling, "dropout": dropout, **kwargs}
    if window is None:
        return own(module, query, key, value, attention_mask, **options)
    total = key.layer.seen if isinstance(key, Halves) else key.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    full = lambda q, k, v: own(module, q, k, v, attention_mask, **options)[0]  # noqa: E731
    exist = existing(attention_mask, total, len(query))
    return with_windows(window, query, key, value, exist, full, scale=scale, dropout=dropout), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


def _eager_of(module: Any) -> Any:
    """The eager attention of the stock class's own file."""
    stock = next(other for other in type(module).__mro__ if other.__module__.startswith("transformers."))
    return sys.modules[stock.__module__].eager_attention_forward


def existing(mask: Any, total: int, rows: int) -> Tensor | None:
    """Which of all tokens so far exist, (b, total) bool, or None for all of them, by any mask of attention: of keys (b, s) or
    of pairs (b, 1, t, s), boolean or additive. Raises ValueError for a mask of another form."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ValueError(f"windows take the attention sdpa or eager, not one with a {type(mask).__name__}")
    seen = mask if mask.dim() == 2 else mask[:, 0, -1]  # the last token reads all that exist
    exist = (seen[:, :total] == 0) if seen.is_floating_point() else seen[:, :total].bool()
    return None if bool(exist.all()) else exist.expand(rows, -1)


def with_windows(
    window: AttentionWindow, q: Tensor, k: Tensor | Halves, v: Tensor | Halves, exist: Tensor | None,
    full: Callable[[Tensor, Tensor, Tensor], Tensor], *, scale: float = 1.0, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Attention of q (b, heads, t, d), the last tokens of all, some of whose heads have a window -> (b, t, heads, d). k, v: as
    in `attend`. exist (b, all tokens), or None. full: the attention of the others, of q, k and v to (b, t, heads, d)."""
    groups = [*window.groups]
    if isinstance(k, Halves):
        assert isinstance(v, Halves)
        layer: WindowedLayer | None = k.layer
        count = k.full.shape[1] + len(groups)
        rest, recent = (k.full, v.full), (k.layer.recent_keys, k.layer.recent_values)
        kept, total = (k.layer.first_keys, k.layer.first_values), k.layer.seen
    else:
        assert isinstance(v, Tensor)
        layer, count, kept, total = None, k.shape[1], (None, None), k.shape[2]
        others = [group for group in range(count) if group not in groups]
        rest, recent = (k[:, others], v[:, others]), (k[:, groups], v[:, groups])
    each = q.shape[1] // count
    heads = [group * each + i for group in groups for i in range(each)]
    others = [head for head in range(q.shape[1]) if head not in heads]
    first = _first(window, recent, kept, exist, total)
    parts = [full(q[:, others], *rest)] if others else []
    parts.append(_in_blocks(window, q[:, heads], recent, first, exist, total, scale, dropout).transpose(1, 2))
    if layer is not None:
        layer.trim(first[:2])
    order = torch.tensor([*others, *heads], device=q.device).argsort()
    return torch.cat([part.to(parts[0].dtype) for part in parts], 2).index_select(2, order)


def _first(window: AttentionWindow, recent: Any, kept: Any, exist: Tensor | None, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of the first tokens (b, groups, f, d), and which tokens these are (b, f); `total` where there are fewer.
    recent, kept: keys and values of the latest tokens, and those of the first ones as the cache has them, or None."""
    rows, device = len(recent[0]), recent[0].device
    if exist is None:
        numbers = torch.arange(window.first, device=device).clamp_max(total).expand(rows, -1)
    else:
        numbers = torch.where(exist, torch.arange(total, device=device), total)
        numbers = F.pad(numbers, (0, max(0, window.first - total)), value=total)
        numbers = numbers.topk(window.first, largest=False, sorted=True).values
    begin = total - recent[0].shape[2]
    found = []
    for latest, earlier in zip(recent, kept, strict=True):
        at = (numbers - begin).clamp(0, latest.shape[2] - 1)[:, None, :, None]
        those = latest.gather(2, at.expand(-1, latest.shape[1], -1, latest.shape[3]))
        found.append(those if earlier is None else torch.where((numbers < begin)[:, None, :, None], earlier, those))
    return found[0], found[1], numbers


def _in_blocks(
    window: AttentionWindow, q: Tensor, recent: Any, first: tuple[Tensor, Tensor, Tensor], exist: Tensor | None, total: int,
    scale: float, dropout: float,
) -> Tensor:  # fmt: skip
    """(b, heads, t, d) of heads with a window, of so many queries at a time that scores are few."""
    keys, values = recent
    t, begin = q.shape[2], total - keys.shape[2]
    parts = []
    for start in range(0, t, BLOCK):
        block = q[:, :, start : start + BLOCK]
        at = torch.arange(total - t + start, total - t + start + block.shape[2], device=q.device)[:, None]
        low = max(begin, total - t + start - window.length + 1)
        read = slice(low - begin, total - t + start + block.shape[2] - begin)
        among = torch.arange(low, read.stop + begin, device=q.device)
        latest = (among <= at) & (among > at - window.length)
        latest = latest[None] if exist is None else latest & exist[:, None, low : read.stop + begin]
        earlier = first[2][:, None] <= at - window.length
        mask = torch.cat([earlier, latest.expand(len(q), -1, -1)], 2)[:, None]
        parts.append(
            F.scaled_dot_product_attention(
                block, torch.cat([first[0], keys[:, :, read]], 2), torch.cat([first[1], values[:, :, read]], 2), attn_mask=mask,
                dropout_p=dropout, scale=scale, enable_gqa=block.shape[1] != keys.shape[1],
            )
        )  # fmt: skip
    return torch.cat(parts, 2)
