"""Where the mixers and heads of a model are: Mambas, Transformers, hybrids of both, and this project's own classes.

In every mixer, SSM or attention, a head owns the columns [h * width, (h + 1) * width) of what the mixer's output projection
reads. To ablate a head is to replace those columns. So a family can be analysed as soon as it is known where its blocks hold
their mixers, which SLOTS says: a model of another layout is one more line there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import numpy as np
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.errors import UserError
from surgery.hybrids.layer_graft import LayerGraftMixer
from surgery.records.site import Site

Kind = Literal["ssm", "attention"]


@dataclass(frozen=True)
class Slot:
    """Where a block may hold a mixer: `path`, from the block; `outs`, what its output projection may be called.

    kind None: its projections tell which kind it is. feeds: the block's other mixer reads what this one wrote.
    """

    path: str
    kind: Kind | None
    outs: tuple[str, ...]
    feeds: bool = False


# A block may hold several. SSMs first: where a block holds both kinds, its SSM heads are counted first.
SLOTS = (
    Slot("mamba", "ssm", ("out_proj",)),  # Bamba, Falcon-H1, GraniteMoeHybrid, Jamba, Zamba2
    Slot("mamba_decoder.mamba", "ssm", ("out_proj",)),  # Zamba2's hybrid layers: attention, then an SSM that reads it
    Slot("mlstm_layer", "ssm", ("out_proj",)),  # xLSTM
    Slot("linear_attn", "ssm", ("out_proj", "o_proj")),  # Gated DeltaNet: Qwen3-Next, Qwen3.5, OLMo-Hybrid
    Slot("mixer", None, ("out_proj", "o_proj")),  # Mamba-1 and -2, Falcon-Mamba, NemotronH, and this project's classes
    Slot("temporal_block", None, ("linear_out", "o_proj")),  # RecurrentGemma
    Slot("shared_transformer.self_attn", "attention", ("o_proj",), feeds=True),
    Slot("self_attn", "attention", ("o_proj", "dense", "out_proj")),  # Llama and all that have its layout, Phi, OPT
    Slot("attention", "attention", ("dense",)),  # GPT-NeoX
    Slot("self_attention", "attention", ("dense",)),  # Falcon, BLOOM
    Slot("attn", "attention", ("out_proj",)),  # MPT
)
# Paths to the blocks, from the model without its language-model head.
BLOCKS = ("layers", "h", "decoder.layers", "blocks", "language_model.layers")
WIDTHS: dict[Kind, tuple[str, ...]] = {
    "ssm": ("head_v_dim", "head_dim", "multihead_norm.head_dim"), "attention": ("v_head_dim", "head_dim", "head_size"),
}  # fmt: skip
NO_MIXER = ("down_proj", "experts")  # a module in a slot that has one of these mixes channels only (NemotronH's MLPs and MoEs)


@dataclass(frozen=True)
class MixerPlace:
    """A layer's sequence-mixing module. `out`: its output projection, which reads heads * width columns. `first`: the number of
    its first head within the layer. `feeds`: as in Slot.

    A head of width 1 is a channel (Mamba-1, Falcon-Mamba, Jamba, and RecurrentGemma, whose recurrence is one per channel: the
    blocks of its gates share weights, not a mixing matrix).
    """

    layer: int
    kind: Kind
    module: nn.Module
    out: nn.Linear
    heads: int
    width: int
    first: int = 0
    feeds: bool = False

    def columns(self, head: int) -> slice:
        """What a head, numbered within the layer, owns of the output projection's input."""
        start = (head - self.first) * self.width
        return slice(start, start + self.width)


@dataclass(frozen=True)
class Anatomy:
    """The blocks in order, and their mixers, by layer and then by first head. A block may have no mixer, or several."""

    blocks: tuple[nn.Module, ...]
    mixers: tuple[MixerPlace, ...]

    def mixers_of(self, layer: int) -> tuple[MixerPlace, ...]:
        """The mixers of a layer."""
        return self._by_layer.get(layer, ())

    @cached_property
    def _by_layer(self) -> dict[int, tuple[MixerPlace, ...]]:
        return {layer: tuple(mixers) for layer, mixers in groupby(self.mixers, key=lambda mixer: mixer.layer)}

    def heads(self, layer: int) -> int:
        """How many heads a layer has, of both kinds."""
        return sum(mixer.heads for mixer in self.mixers_of(layer))

    def sites(self) -> list[Site]:
        """All heads, in order."""
        return [Site(layer, (head,)) for layer in self.layers() for head in range(self.heads(layer))]

    @cached_property
    def coordinates(self) -> tuple[np.ndarray, np.ndarray]:
        """The layer, and the number within it, of every head of sites(). A Mamba-1 of 7B has half a million."""
        layers = self.layers()
        counts = [self.heads(layer) for layer in layers]
        return np.repeat(layers, counts), np.concatenate([np.arange(count) for count in counts])

    def site(self, number: int) -> Site:
        """A head by its number in sites(), from 0."""
        layers, heads = self.coordinates
        return Site(int(layers[number]), (int(heads[number]),))

    def numbers(self, sites: Iterable[Site]) -> np.ndarray:
        """Of single heads their numbers in sites()."""
        layers, _ = self.coordinates
        first = {layer: int(np.searchsorted(layers, layer)) for layer in self.layers()}
        return np.array([first[site.layer] + site.heads[0] for site in sites], dtype=int)

    def ssm(self, layer: int) -> MixerPlace | None:
        """The SSM of a layer, whose heads come first in it; None where it has none."""
        return next((mixer for mixer in self.mixers_of(layer) if mixer.kind == "ssm"), None)

    @cached_property
    def ssms(self) -> tuple[MixerPlace, ...]:
        """All SSMs, by layer: what grafts can be put into, where a family has them."""
        return tuple(mixer for mixer in self.mixers if mixer.kind == "ssm")

    @cached_property
    def of_ssms(self) -> np.ndarray:
        """(heads,) bool: which of sites() are heads of an SSM."""
        layers, heads = self.coordinates
        count = np.zeros(len(self.blocks), dtype=int)
        for mixer in self.ssms:
            count[mixer.layer] = mixer.heads
        return heads < count[layers]

    def layers(self) -> list[int]:
        """The layers that have a mixer."""
        return sorted({mixer.layer for mixer in self.mixers})

    def mixer_of(self, site: Site) -> MixerPlace:
        """The mixer of a site of one head. Raises UserError if the model lacks it."""
        (head,) = site.heads
        for mixer in self.mixers_of(site.layer):
            if mixer.first <= head < mixer.first + mixer.heads:
                return mixer
        raise UserError(f"the model has no site {site}: {self._shape(site.layer)}")

    def check(self, sites: Iterable[Site]) -> None:
        """Raise UserError for the first site that the model lacks."""
        for site in sites:
            if site.layer >= len(self.blocks) or max(site.heads, default=0) >= self.heads(site.layer):
                raise UserError(f"the model has no site {site}: {self._shape(site.layer)}")

    def kinds(self) -> str:
        """Which layers are what, e.g. "0-3 ssm, 4 attention, 5 ssm and attention"."""
        names = [" and ".join(mixer.kind for mixer in self.mixers_of(layer)) or "no mixer" for layer in range(len(self.blocks))]
        runs = [(name, [layer for layer, _ in run]) for name, run in groupby(enumerate(names), key=lambda pair: pair[1])]
        return ", ".join(f"{run[0]}-{run[-1]} {name}" if len(run) > 1 else f"{run[0]} {name}" for name, run in runs)

    def _shape(self, layer: int) -> str:
        if layer >= len(self.blocks):
            return f"it has layers 0-{len(self.blocks) - 1}"
        heads = self.heads(layer)
        return f"layer {layer} has heads 0-{heads - 1}" if heads else f"layer {layer} has no heads"


def anatomy(model: PreTrainedModel) -> Anatomy:
    """Find a model's blocks, mixers and heads. Raises UserError if its layout is not one of SLOTS'."""
    blocks = blocks_of(model)
    mixers: list[MixerPlace] = []
    for layer, block in enumerate(blocks):
        paths = [(slot, module) for slot in SLOTS if (module := _descend(block, slot.path)) is not None]
        filled = [(slot, module) for slot, module in paths if any(hasattr(module, name) for name in (*slot.outs, *NO_MIXER))]
        if paths and not filled:
            slot, module = paths[0]
            outs = " or ".join(slot.outs)
            raise _unknown(model, f"layer {layer}'s {type(module).__name__} has no linear output projection named {outs}")
        if not filled:
            names = ", ".join(dict.fromkeys(slot.path for slot in SLOTS))
            parts = ", ".join(f"{name} ({type(part).__name__})" for name, part in block.named_children())
            block_class = f"layer {layer} ({type(block).__name__})"
            raise _unknown(model, f"{block_class} holds no mixer under any of {names}; it holds {parts or 'no modules'}")
        first = 0
        for slot, module in filled:
            mixer = _mixer(model, layer, slot, module, first)
            if mixer is not None:
                mixers.append(mixer)
                first += mixer.heads
    if not mixers:
        raise _unknown(model, "no layer has a mixer")
    return Anatomy(blocks, tuple(mixers))


def mixer_at(model: PreTrainedModel, layer: int) -> Any:
    """The module of a layer in which grafts are put, or which is there instead; None if it has only an attention of its
    own, or no mixer. Also of a model without values."""
    block = blocks_of(model)[layer]
    slots = [slot for slot in SLOTS if slot.kind != "attention" or _is_linear(model, layer)]  # where grafts are put
    found = ((slot, _descend(block, slot.path)) for slot in slots)
    return next((module for slot, module in found if any(hasattr(module, name) for name in slot.outs)), None)


def _is_linear(model: PreTrainedModel, layer: int) -> bool:
    """Whether a layer's mixer is linear attention, whatever it is called (MiniMax, Kimi Linear)."""
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or {layer: None}
    return types[layer] == "linear_attention"


def blocks_of(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """A model's blocks. Raises UserError if they are under none of BLOCKS."""
    return tuple(block_list(model))


def block_list(model: PreTrainedModel) -> nn.ModuleList:
    """What holds them, and is iterated over by its forward."""
    check_decoder(model.config)
    for path in BLOCKS:
        blocks = _descend(model.base_model, path)
        if isinstance(blocks, nn.ModuleList) and len(blocks):
            return blocks
    held = ", ".join(
        f"{name} ({len(part)} x {type(part[0]).__name__})" for name, part in model.base_model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) and not any(map(str.isdigit, name.split(".")))
    )  # fmt: skip
    raise _unknown(model, f"its blocks are under none of {', '.join(BLOCKS)}; it has {held or 'no list of modules'}")


def _mixer(model: PreTrainedModel, layer: int, slot: Slot, module: nn.Module, first: int) -> MixerPlace | None:
    out: Any = next((projection for name in slot.outs if (projection := getattr(module, name, None)) is not None), None)
    if out is None:
        return None  # one of NO_MIXER
    where = f"layer {layer}'s {type(module).__name__}"
    if not isinstance(out, nn.Linear):
        raise _unknown(model, f"{where} has no linear output projection named {' or '.join(slot.outs)}")
    columns = out.in_features
    kind: Kind = slot.kind or ("attention" if hasattr(module, "q_proj") else "ssm")
    width = next((int(size) for name in WIDTHS[kind] if (size := _descend(module, name))), None)
    if width is None:
        width = 1 if kind == "ssm" else columns // model.config.get_text_config(decoder=True).num_attention_heads
    if columns % width:
        raise _unknown(model, f"{where} has heads of {width} columns, but its projection reads {columns}")
    if _is_linear(model, layer):
        kind = "attention" if isinstance(module, LayerGraftMixer) else "ssm"
    return MixerPlace(layer, kind, module, out, columns // width, width, first, slot.feeds)


def _descend(module: nn.Module, path: str) -> Any:
    """The submodule at a dotted path, or None."""
    submodule: Any = module
    for name in path.split("."):
        submodule = getattr(submodule, name, None)
    return submodule


def check_decoder(config: PreTrainedConfig) -> None:
    """Raise UserError for a model that has an encoder, also where transformers can take its decoder out of it (Whisper)."""
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(config, "it has an encoder")


def _unknown(model: PreTrainedModel, why: str) -> UserError:
    return _refusal(model.config, f"{why}; see surgery/models/anatomy.py for layouts")


def _refusal(config: PreTrainedConfig, why: str) -> UserError:
    return UserError(f"cannot analyse a {config.model_type} model: {why}")
