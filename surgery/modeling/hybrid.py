"""What the language models of all hybrids have in common, whatever their mixers are."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Cache
from transformers.cache_utils import StaticCache

from .graft import make_room, what_went
from .layer_graft import LayerGraftMixer

OF_LOSS = ("num_items_in_batch", "ignore_index", "shift_labels")  # which stock models hand to their backbone as well


@dataclass(frozen=True)
class Family:
    """A family of bases that can be grafted: one file, named as the base's model_type, with `FAMILY`.

    base: the stock language model. hybrid: ours; its config_class is the hybrid's.
    """

    base: Any
    hybrid: Any

    @property
    def model_type(self) -> str:
        """Of the base's configuration; the hybrid's is the same with "_hybrid", unless base and hybrid are one class."""
        return self.base.config_class.model_type

    def register(self, backbone: Any) -> "Family":
        """Tell transformers the classes: folders load by the Auto classes, and saving one writes the code along."""
        config, model = self.hybrid.config_class, self.hybrid
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModel.register(config, backbone, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)
        config.register_for_auto_class()
        backbone.register_for_auto_class("AutoModel")
        model.register_for_auto_class("AutoModelForCausalLM")
        return self


class HybridConfig:
    """A mixin before a configuration of transformers, which has the field `grafts`; its model_type is the name of the family's
    file, with "_hybrid" behind it. It names the classes of its exported code, because a folder that it is read from may name a
    stranger's."""

    grafts: list | None

    def __post_init__(self: Any, **kwargs: Any) -> None:
        if isinstance(getattr(type(self), "layer_types", None), property):
            kwargs.pop("layer_types", None)  # versions up to 0.20 wrote what their caches held
        super().__post_init__(**kwargs)  # type: ignore[misc]
        self.grafts = list(self.grafts or [])
        module, name = self.model_type.removesuffix("_hybrid"), type(self).__name__.removesuffix("Config")
        kinds = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
        self.auto_map = {auto: f"{module}.{name}{kind}" for auto, kind in kinds.items()}


class GraftedModel:
    """A mixin before a model of transformers whose mixers may hold grafts, with a language model's head or without. Where all
    mixers are there, __init__ calls put_grafts."""

    def put_grafts(self: Any, first: int = 0) -> None:
        """Make room for the grafts of the configuration, from the entry of this number on."""
        for index, entry in list(enumerate(self.config.grafts))[first:]:
            mixer, kind = self.mixer_at(entry["layer"]), entry.get("kind", "head")
            place = self.config.num_hidden_layers + 2 * index
            if gone := what_went(entry):
                raise ValueError(f"layer {entry['layer']} has {gone}, which went with version 0.30")
            if mixer is None:
                raise ValueError(f"layer {entry['layer']} holds no mixer that can be grafted")
            if kind == "head":
                mixer.put_graft(entry, place)
                continue
            block, graft = self.base_model.layers[entry["layer"]], LayerGraftMixer(self.config.hidden_size, entry, place)
            for buffer in mixer._non_persistent_buffers_set:  # into which a stock model's initialisation writes
                graft.register_buffer(buffer, mixer._buffers[buffer], persistent=False)
            block.set_submodule(next(name for name, module in block.named_modules() if module is mixer), graft)

    def mixer_at(self: Any, layer: int) -> Any:
        """The mixer of a layer that can be grafted, or None."""
        if not 0 <= layer < len(self.base_model.layers):
            return None
        return next((m for m in self.base_model.layers[layer].modules() if hasattr(m, "graft_enabled")), None)

    def own_mixers(self: Any) -> list[Any]:
        """The mixers with a graft that splice added, and that did not come with the base."""
        return [self.mixer_at(entry["layer"]) for entry in self.config.grafts if not entry.get("of_base")]

    @contextmanager
    def disable_grafts(self: Any) -> Iterator[None]:
        """`with hybrid.disable_grafts(): ...`: meanwhile the hybrid computes what its base computes, bit for bit. Grafts that
        the base brought ("of_base" in their entries) stay. A cache that is begun meanwhile holds no keys, and is refused
        afterwards; one that holds keys is refused meanwhile."""
        grafted = self.own_mixers()
        before = [m.graft_enabled for m in grafted]
        try:
            for mixer in grafted:
                mixer.graft_enabled = False
            yield
        finally:
            for mixer, enabled in zip(grafted, before, strict=True):
                mixer.graft_enabled = enabled

    def with_room(self: Any, cache: Cache | None, length: int | None = None) -> Cache | None:
        """The cache, with layers for all grafts. length: of a static cache. Raises ValueError for one that holds tokens, and
        not the keys of the grafts that are on, or keys of one that is off."""
        layers = self.config.num_hidden_layers
        if not isinstance(cache, Cache) or not self.config.grafts:
            return cache
        make_room(cache, layers, len(self.config.grafts), length)
        for index, entry in enumerate(self.config.grafts):
            held, wanted = cache.layers[layers + 2 * index].is_initialized, self.mixer_at(entry["layer"]).graft_enabled
            if held != wanted and self.has_read(cache):
                how = "with the grafts, and they are off" if held else "without the grafts, by the base or in disable_grafts()"
                raise ValueError(f"the cache was begun {how}: use a new one")
        return cache

    def has_read(self: Any, cache: Cache) -> bool:
        """Whether the base's layers of a cache have read a token; within disable_grafts() those of the grafts have not."""
        layers = cache.layers[: self.config.num_hidden_layers]
        return any(getattr(layer, "has_previous_state", {}).get(0) for layer in layers)

    @classmethod
    def is_custom_code(cls) -> bool:
        """transformers skips the initialisation of some modules of foreign code, and does not give buffers their values that no
        checkpoint holds. The modules here are its own, and grafts have no such buffers."""
        return False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """transformers looks for experts in the file of a class; those of a hybrid are in the file of its stock class."""
        stock: Any = next((kind for kind in cls.__mro__ if kind.__module__.startswith("transformers.models.")), None)
        return stock is not None and bool(stock._can_set_experts_implementation())


class HybridLanguageModel(GraftedModel):
    """A mixin before a language model of transformers. backbone_class: ours, in the place of the stock one, where there is one.
    cache_name: under which its forward returns the cache."""

    backbone_class: Any = None
    cache_name = "past_key_values"

    def __init__(self: Any, config: Any):
        super().__init__(config)  # type: ignore[call-arg]
        if self.backbone_class is not None:
            setattr(self, self.base_model_prefix, self.backbone_class(config))
            self.post_init()

    def graft_parameters(self: Any) -> dict[str, nn.Parameter]:
        """The parameters of the grafts, by name: what splice added, and not what came with the base."""
        own = {id(parameter) for mixer in self.own_mixers() for parameter in mixer.graft.parameters()}
        return {name: parameter for name, parameter in self.named_parameters() if id(parameter) in own}

    def __repr__(self: Any) -> str:
        """In a line where the grafts are. The backbone shows its modules."""
        heads = [f".H{','.join(map(str, graft['heads']))}" if graft.get("heads") else "" for graft in self.config.grafts]
        sites = "; ".join(f"L{graft['layer']}{each}" for graft, each in zip(self.config.grafts, heads, strict=True))
        what = f"attention at {sites}" if sites else "no grafts"
        return f"<{type(self).__name__}: {what}; print(model.base_model) shows its modules>"

    def prepare_inputs_for_generation(
        self: Any, input_ids: Tensor, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As in transformers, but the mask is kept, and where the cache holds the beginning of the text, only the tokens after
        it are read. Where only new tokens are given, and are more than the cache holds, only a mask of the whole text can tell.
        transformers looks for inputs_embeds in the signature."""
        cache = one_cache(kwargs.get("cache_params"), kwargs.get("past_key_values"))
        mask = kwargs.get("attention_mask")
        if kwargs.get("is_first_iteration") and kwargs.get("next_sequence_length") is None and cache:
            whole, seen = (input_ids if inputs_embeds is None else inputs_embeds).shape[1], 0
            with suppress(ValueError):  # none of its layers counts, in a pure SSM without grafts
                seen = int(cache.get_seq_length())
            if not seen and self.has_read(cache):
                seen = getattr(cache, "tokens_read", 0)  # what `generate` has noted
            told = kwargs.get("position_ids") if mask is None else mask  # `generate` drops a mask without pads
            if 0 < seen < whole and (told is None or told.shape[-1] == whole):
                kwargs["next_sequence_length"] = whole - seen
        kwargs["inputs_embeds"] = inputs_embeds
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)  # type: ignore[misc]
        if mask is not None and inputs.get("attention_mask") is None:
            inputs["attention_mask"] = mask
        return inputs

    def _prepare_cache_for_generation(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        """transformers names the cache of classes with "mamba" in their name `cache_params`, and looks for no other."""
        name = "cache_params" if "mamba" in type(self).__name__.lower() else "past_key_values"
        guided = generation_config.use_cache and generation_config.guidance_scale not in (None, 1)
        if guided and self.cache_name == "cache_params":
            raise ValueError("guidance_scale: transformers does not find this model's cache for it; set use_cache=False")
        given = [model_kwargs.pop(each, None) for each in ("cache_params", "past_key_values")]
        if (cache := one_cache(*given)) is not None:
            model_kwargs[name] = cache
        made = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]
        length = None  # of a static cache; one that was given may be for more than this call
        if (used := model_kwargs.pop(name, None)) is not None:
            if cache is None and isinstance(used, StaticCache):
                length = max(args[-1], generation_config.max_cache_len or 0)
            model_kwargs[self.cache_name] = self.with_room(used, length)
        return made

    def _update_model_kwargs_for_generation(self: Any, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        """Notes on the cache how many tokens it has read: a cache of states alone does not count them."""
        told = next(
            (model_kwargs[name] for name in ("attention_mask", "position_ids") if model_kwargs.get(name) is not None), None
        )
        if told is not None and isinstance(cache := outputs.get(self.cache_name), Cache):
            cache.tokens_read = told.shape[-1]  # type: ignore[attr-defined]
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)  # type: ignore[misc]


def one_cache(cache_params: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """The cache, under whichever name it was given. Raises ValueError for two."""
    if cache_params is not None and past_key_values is not None and cache_params is not past_key_values:
        raise ValueError("cache_params and past_key_values are two names of one cache: give one of them")
    return past_key_values if cache_params is None else cache_params


def refuse_unknown(model: Any, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise TypeError for a keyword argument of a forward that nothing here reads."""
    for name in given:
        if name not in known:
            raise TypeError(f"{type(model).__name__}.forward() got an unexpected keyword argument '{name}'")
    if given.get("output_attentions"):
        raise ValueError("output_attentions: a hybrid returns no attention weights")
