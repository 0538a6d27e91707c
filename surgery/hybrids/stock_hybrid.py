"""Hybrids made by replacing mixers inside a stock model: attention, MLPs, experts and shared blocks stay transformers' own.

    BambaHybridForCausalLM = stock_hybrid(BambaForCausalLM, BambaMixer, SSDMixer)

is the stock class with another configuration, the stock one and `grafts`. In every layer that `grafts` names, the stock mixer
becomes one of ours: same object, same parameters under the same names, and a graft beside them. Without grafts, and in every
other layer, the model is the stock model. Nothing is spliced by editing its forward.

A family says three things: the stock language model, the stock class of its mixers (one a layer at most, found wherever it
is in a block), and the class of ours (a GraftedMixer, mixer.py) that such a mixer becomes. The latter is a mixin before the
stock class, so it reads the stock mixer's attributes.

Two of the stock model's ways have to be bridged (InStock, GraftCache). It hands a mixer no cache for keys: its layer has none,
or one for an attention of its own. And it hands it a mask of padding for a prompt alone; attention needs it ever after.

What else a stock model's own code lacks is in a mixin before all, `around`: XLSTMLanguageModel (xlstm.py) replaces a
forward that takes no mask, HybridLanguageModel (ssm_model.py) that of all Mambas, LightningLanguageModel (lightning_mixer.py)
brings a cache whose layers can be added to.
"""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from types import new_class
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from surgery.hybrids.layer_graft import LayerGraftBlock, LayerGraftMixer, is_layer_graft
from surgery.hybrids.packed import packing
from surgery.hybrids.patching import become
from surgery.hybrids.sources import Generated
from surgery.hybrids.spliced import Spliced, classes_of, register
from surgery.hybrids.states import Handed
from surgery.hybrids.windows import attention_in, give_window, is_window, keep_window, window_of


class GraftCache:
    """The cache of a model as one of its grafted mixers sees it: states are in the mixer's own layer, keys and values in one
    behind the model's last layer, and the next one says which keys exist. As layers of the cache they are reordered, cropped
    and moved as all others are. Static where the cache is."""

    def __init__(self, cache: Cache, place: int):
        self.cache, self.place = cache, place
        self.make_room(cache, place + 2)

    @staticmethod
    def make_room(cache: Cache, layers: int, length: int | None = None) -> None:
        """Let a cache have so many layers. length: of a static one without keys of its own, which does not know it."""
        while len(cache.layers) < layers:
            static = next((layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)), length)
            cache.layers.append(DynamicLayer() if static is None else StaticLayer(static))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self.cache.update(k, v, self.place)

    def get_seq_length(self, layer: int) -> int:
        return int(self.cache.get_seq_length(self.place))

    def existing(self, hidden: Tensor, mask: Tensor | None) -> Tensor | None:
        """Which of the keys of the past and of the tokens `hidden` (b, t, d) exist, (b, s) bool, or None for all of them. mask
        (b, t): which of these tokens do. To be asked once in each forward, before their keys come."""
        b, t, _ = hidden.shape
        past, known = self.get_seq_length(0), int(self.cache.get_seq_length(self.place + 1))
        if mask is None and not known:
            return None
        new = torch.ones(b, 1, past - known + t, 1, dtype=torch.bool, device=hidden.device)
        if mask is not None:
            new[:, 0, -t:, 0] = mask
        exist, _ = self.cache.update(new, new[..., :0], self.place + 1)
        return exist[:, 0, : past + t, 0]


class InStock:
    """A mixin before a mixer of ours and a stock one, and takes what a stock block gives its mixer."""

    stock: ClassVar[type]
    returns_pair: bool
    graft: Any
    layer_idx: int
    cache_place: int

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Cache | Handed | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        pairs: Tensor | None = None,
        positions_to_keep: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """attention_mask (b, t): which of these tokens exist; None for all. past_key_values: another name of cache_params.
        pairs: which tokens attend to which, in the place of that, for attention. positions_to_keep, position_ids: as ours
        takes them. kwargs: packed.PACKED among them, or what they say, as `packing`."""
        if isinstance(cache_params, Handed):
            cache_params, attention_mask = cache_params
        cache: Any = past_key_values if cache_params is None else cache_params
        if "packing" in kwargs:
            documents = kwargs["packing"]
        else:
            documents = packing(hidden_states, attention_mask, None, cache, None, kwargs)
        mask = None if attention_mask is None else attention_mask.bool()
        if cache is not None and self.graft is not None:
            cache = GraftCache(cache, self.cache_place)
            if (window := getattr(self, "window", None)) is not None:
                keep_window(cache.cache, self.cache_place, window)
            mask = cache.existing(hidden_states, mask)
        ours: Any = super()
        mixed = ours.forward(
            hidden_states, cache, attention_mask, mask if pairs is None else pairs, positions_to_keep=positions_to_keep,
            position_ids=position_ids, packing=documents,
        )  # fmt: skip
        return (mixed, None) if self.returns_pair else mixed


class LayerGraftInStock(InStock, LayerGraftMixer):
    """A layer graft in the place of a stock mixer."""


class StockHybrid(Spliced):
    """A mixin before a stock language model."""

    stock: ClassVar[type]
    stock_mixer: ClassVar[type]
    mixer_class: ClassVar[type]
    generated: ClassVar[Generated]  # the module that makes this class in an exported folder
    all_mixers: ClassVar[bool] = False  # whether the mixers without a graft become ours as well
    packs: ClassVar[bool] = False  # whether its own forward keeps documents that share a row apart
    exchanged: ClassVar[dict[type, type]] = {}  # what modules of the stock model become
    plain_blocks: ClassVar[bool] = False  # whether a donor's whole layer can take the place of a block
    without_head: ClassVar[Any]

    def __init__(self: Any, config: Any):
        super().__init__(config)  # type: ignore[call-arg]
        for module in self.modules():
            if (other := self.exchanged.get(type(module))) is not None:
                become(module, other)
        grafts = [spec for spec in config.grafts if not is_window(spec)]
        places = {spec["layer"]: place for place, spec in enumerate(grafts)}
        for layer in range(config.num_hidden_layers) if self.all_mixers else places:
            mixer = self.mixer_at(layer)
            if mixer is None and layer not in places:
                continue
            if mixer is None:
                raise ValueError(f"layer {layer} holds no {self.stock_mixer.__name__}, and cannot be grafted")
            if layer in places and is_layer_graft(grafts[places[layer]]):
                mixer = self.replace_mixer(mixer, grafts[places[layer]])
            else:
                become(mixer, self.mixer_class)
                if not hasattr(mixer, "layer_idx"):
                    mixer.layer_idx = layer
                mixer.take_grafts(config)
            if layer in places:
                mixer.cache_place = config.num_hidden_layers + 2 * places[layer]
        for spec in filter(is_window, config.grafts):
            self.give_window(spec)

    def give_window(self: Any, spec: dict[str, Any]) -> None:
        """Let heads of a layer's attention, which may be a layer graft of the base, have a window."""
        layer, window = spec["layer"], window_of(spec)
        mixer = self.mixer_at(layer)
        if isinstance(mixer, LayerGraftMixer):
            mixer.window = window
        else:
            give_window(attention_in(self.base_model.layers[layer], self.stock_mixer, self.config), layer, window)
        self._can_compile_fullgraph = False

    def replace_mixer(self: Any, mixer: Any, spec: dict[str, Any]) -> LayerGraftInStock:
        """Put a layer graft in the place of a mixer, or, where it brings an MLP, of its whole block."""
        blocks, layer = self.base_model.layers, spec["layer"]
        graft = LayerGraftInStock(self.config, spec)
        graft.returns_pair = self.mixer_class.returns_pair
        for name in mixer._non_persistent_buffers_set:  # into which a stock model's initialisation writes
            graft.register_buffer(name, mixer._buffers[name], persistent=False)
        if spec["mlp"] is not None:
            blocks[layer] = LayerGraftBlock(self.config, graft)
        else:
            blocks[layer].set_submodule(next(name for name, module in blocks[layer].named_modules() if module is mixer), graft)
        return graft

    def block_name(self: Any, layer: int) -> str:
        """What the names of a block's tensors begin with."""
        block = self.base_model.layers[layer]
        return next(f"{name}." for name, module in self.named_modules() if module is block)

    def new_cache(self: Any) -> Cache:
        """What the stock model would make for its layers."""
        return DynamicCache(config=self.config)

    def with_room(self: Any, cache: Any, length: int | None = None) -> Any:
        """The cache, with layers for all grafts. A cache that has them from the beginning can say how long it is, also where
        the model has no attention of its own. length: of a static cache."""
        if isinstance(cache, Cache) and self.config.grafts:
            GraftCache.make_room(cache, self.config.num_hidden_layers + 2 * len(self.config.grafts), length)
        return cache

    def cached(self: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a forward, with a cache of ours where the stock model would make one of its own."""
        cache, use_cache = arguments.get("past_key_values"), arguments.get("use_cache")
        use_cache = getattr(self.config, "use_cache", False) if use_cache is None else use_cache
        if cache is None and (not use_cache or (self.training and self.is_activation_checkpointing)):
            return arguments
        return arguments | {"past_key_values": self.with_room(self.new_cache() if cache is None else cache)}

    def _prepare_cache_for_generation(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        made = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]
        length = max(args[-1], generation_config.max_cache_len or 0)
        for cache in (model_kwargs.get("past_key_values"), model_kwargs.get("cache_params")):
            self.with_room(cache, length if isinstance(cache, StaticCache) else None)
        return made

    @classmethod
    def is_custom_code(cls) -> bool:
        """Loading gives buffers that no checkpoint holds their values where all modules are transformers' own, and skips some
        modules of other code. The modules here are its own, and grafts have no such buffers."""
        return False

    def mixer_at(self: Any, layer: int) -> Any:
        """The mixer of a layer that grafts can be put into, or the layer graft that took its place, or None."""
        modules = self.base_model.layers[layer].modules()
        return next((module for module in modules if isinstance(module, (self.stock_mixer, LayerGraftMixer))), None)


def stock_hybrid(model: type, stock_mixer: type, mixer: type, around: type | None = None) -> Any:
    """The hybrid class of a stock language model; its configuration's class is its `config_class`. stock_mixer: what becomes
    attention in part. mixer: the class of ours for that. around: what StockHybrid is to do otherwise, and a forward where the
    stock one will not do. Both are registered with transformers."""
    name = model.__name__.removesuffix("ForCausalLM") + "Hybrid"
    stock_config: Any = model.config_class  # type: ignore[attr-defined]
    caller = sys._getframe(1).f_globals  # of the module in which pickle is to find the classes
    module = f"{stock_config.model_type}_hybrid"

    def describe(self: Any, **kwargs: Any) -> None:
        if isinstance(getattr(stock_config, "layer_types", None), property):
            kwargs.pop("layer_types", None)  # versions up to 0.20 wrote what their caches held
        super(config, self).__post_init__(**kwargs)
        self.grafts = self.grafts or []
        self.auto_map = classes_of(module, name)  # a folder that it is read from may name a stranger's

    def made(kind: str, bases: tuple[type, ...], fields: dict[str, Any]) -> Any:
        fields = {**fields, "__module__": caller["__name__"]}
        caller[name + kind] = new_class(name + kind, bases, exec_body=lambda namespace: namespace.update(fields))
        return caller[name + kind]

    config = made(
        "Config", (stock_config,),
        {"model_type": module, "grafts": None, "__annotations__": {"grafts": list | None}, "__post_init__": describe},
    )  # fmt: skip
    inside: type[nn.Module] = made("Mixer", (InStock, mixer, stock_mixer), {"stock": stock_mixer})
    before = () if around is None else (around,)
    hybrid = made(
        "ForCausalLM", (*before, StockHybrid, model),
        {
            "config_class": config, "stock": model, "stock_mixer": stock_mixer, "mixer_class": inside,
            "generated": _generated(module, name, (model, stock_mixer, mixer, *before)),
            "forward": _caching(getattr(around, "forward", model.forward)),  # type: ignore[attr-defined]
            "__annotations__": {"config": config},
        },
    )  # fmt: skip
    hybrid.without_head = made("Model", (WithoutHead,), {"config_class": config, "language_model": hybrid})
    register(config, hybrid.without_head, hybrid)
    return hybrid


class WithoutHead:
    """What AutoModel finds: the backbone of a hybrid, made and loaded as its language model is, whose mixers are ours."""

    config_class: ClassVar[type]
    language_model: ClassVar[Any]

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        loaded = cls.language_model.from_pretrained(*args, **kwargs)
        return (_without_head(loaded[0]), *loaded[1:]) if isinstance(loaded, tuple) else _without_head(loaded)

    @classmethod
    def _from_config(cls, *args: Any, **kwargs: Any) -> Any:
        return _without_head(cls.language_model._from_config(*args, **kwargs))


def _without_head(model: Any) -> Any:
    """The backbone of a language model, which makes the same cache."""
    names = list(inspect.signature(model.base_model.forward).parameters)

    def cached(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        return (), model.cached(dict(zip(names, args, strict=False)) | kwargs)

    model.base_model.register_forward_pre_hook(cached, with_kwargs=True)
    return model.base_model


def _caching(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A language model's forward, of the same arguments, with StockHybrid.cached."""
    names = list(inspect.signature(forward).parameters)[1:]

    @wraps(forward)
    def caching(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(names, args, strict=False)) | kwargs
        return forward(self, **self.cached(named))

    return caching


def _generated(module: str, name: str, classes: tuple[type, ...]) -> Generated:
    """The module of a hybrid's classes, for a folder that holds the modules it imports, those of transformers excepted."""
    parts = {stock_hybrid.__name__: __name__, **{part.__name__: part.__module__ for part in classes}}
    ours = tuple(dict.fromkeys(where for where in parts.values() if not where.startswith("transformers.")))
    places = {what: f".{where.rpartition('.')[2]}" if where in ours else where for what, where in parts.items()}
    lines = [
        "# The classes of this hybrid; stock_hybrid.py says what they are.",
        *(f"from {place} import {what}" for what, place in places.items()),
        f"{name}ForCausalLM = stock_hybrid({', '.join(part.__name__ for part in classes)})",
        f"{name}Config = {name}ForCausalLM.config_class",
        f"{name}Model = {name}ForCausalLM.without_head",
    ]
    return Generated(f"{module}.py", "\n".join([*lines, ""]), ours)
