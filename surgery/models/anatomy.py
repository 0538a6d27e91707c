"""Where the mixers and heads of a model are: of Mambas, Transformers, hybrids of both, and this project's own classes.

In every mixer, SSM or attention, a head owns the columns [h * width, (h + 1) * width) of what the mixer's output projection
reads. To ablate a head is to replace those columns. So a model can be analysed as soon as it is known where its blocks hold
their mixers, which SLOTS says: another layout is one more line there.
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from surgery.errors import UserError
from surgery.modeling.layer_graft import LayerGraftMixer

Kind = Literal["ssm", "attention"]
CACHES = ("past_key_values", "cache_params", "state")  # what models call the cache that they take and return

# Where a block may hold a mixer, its kind, and what its output projection may be called. Kind None: its modules tell. SSMs come
# first: where a block holds both kinds, the SSM's heads are counted first.
SLOTS: tuple[tuple[str, Kind | None, tuple[str, ...]], ...] = (
    ("mamba", "ssm", ("out_proj", "o_proj")),  # Bamba, Falcon-H1, Granite, Jamba, Zamba2
    ("mamba_decoder.mamba", "ssm", ("out_proj", "o_proj")),  # Zamba2's hybrid layers: attention, then an SSM that reads it
    ("linear_attn", "ssm", ("out_proj", "o_proj")),  # Gated DeltaNet: Qwen3-Next, Qwen3.5, OLMo-Hybrid
    ("mixer", None, ("out_proj", "o_proj")),  # Mamba-1 and -2, Falcon-Mamba, Llamba, Nemotron-H
    ("temporal_block", None, ("linear_out", "o_proj")),  # RecurrentGemma
    ("shared_transformer.self_attn", "attention", ("o_proj",)),
    ("self_attn", "attention", ("o_proj", "dense", "out_proj")),  # Llama and all that have its layout, Phi, OPT
    ("attention", "attention", ("dense",)),  # GPT-NeoX
    ("self_attention", "attention", ("dense",)),  # Falcon, BLOOM
    ("attn", "attention", ("out_proj", "c_proj")),  # MPT
)
BLOCKS = ("layers", "h", "decoder.layers", "blocks", "language_model.layers")  # from the model without its head
WIDTHS: dict[Kind, tuple[str, ...]] = {"ssm": ("head_v_dim", "head_dim"), "attention": ("v_head_dim", "head_dim", "head_size")}
NO_MIXER = ("down_proj", "experts")  # a module in a slot that has one of these mixes channels only (Nemotron-H's MLPs)


@dataclass(frozen=True)
class MixerPlace:
    """A module of a layer that mixes tokens. out: its output projection, which reads heads * width columns. first: the number
    of its first head within the layer.

    A head of width 1 is a channel (Mamba-1, Falcon-Mamba, Jamba, RecurrentGemma).
    """

    layer: int
    kind: Kind
    module: Any
    out: Any
    heads: int
    width: int
    first: int = 0

    def columns(self, head: int) -> slice:
        """What a head, numbered within the layer, owns of the output projection's input."""
        start = (head - self.first) * self.width
        return slice(start, start + self.width)


@dataclass(frozen=True)
class Anatomy:
    """The blocks of a model in order, and their mixers, by layer and then by first head. A block may have none, or several."""

    blocks: tuple[nn.Module, ...]
    mixers: tuple[MixerPlace, ...]

    @property
    def ssms(self) -> tuple[MixerPlace, ...]:
        """The SSMs, by layer: what heads are grafted into, where the model is of a family."""
        return tuple(mixer for mixer in self.mixers if mixer.kind == "ssm")

    def mixers_of(self, layer: int) -> tuple[MixerPlace, ...]:
        """The mixers of a layer."""
        return tuple(mixer for mixer in self.mixers if mixer.layer == layer)


def anatomy(model: Any) -> Anatomy:
    """Find a model's blocks, mixers and heads. Raises UserError if its layout is in none of SLOTS."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # through PEFT's wrapper
    if getattr(inner.config, "is_encoder_decoder", False):
        raise _unknown(inner, "it has an encoder")
    held = (descend(inner.base_model, path) for path in BLOCKS)
    blocks = next((tuple(each) for each in held if isinstance(each, nn.ModuleList) and len(each)), None)
    if blocks is None:
        raise _unknown(inner, f"its blocks are under none of {', '.join(BLOCKS)}")
    mixers: list[MixerPlace] = []
    for layer, block in enumerate(blocks):
        found = [(kind, outs, module) for path, kind, outs in SLOTS if (module := descend(block, path)) is not None]
        filled = [each for each in found if any(hasattr(each[2], name) for name in (*each[1], *NO_MIXER))]
        if not filled:
            parts = ", ".join(f"{name} ({type(part).__name__})" for name, part in block.named_children())
            raise _unknown(
                model, f"layer {layer} ({type(block).__name__}) holds no mixer that is known; it holds {parts or 'nothing'}"
            )
        first = 0
        for kind, outs, module in filled:
            mixer = _measure(model, layer, kind, outs, module, first)
            if mixer is not None:
                mixers.append(mixer)
                first += mixer.heads
    if not mixers:
        raise _unknown(model, "no layer has a mixer")
    return Anatomy(blocks, tuple(mixers))


def _measure(model: Any, layer: int, kind: Kind | None, outs: tuple[str, ...], module: Any, first: int) -> MixerPlace | None:
    """A mixer's place, or None for a module that mixes channels only. Raises UserError where its heads cannot be told."""
    out = next((getattr(module, name) for name in outs if hasattr(module, name)), None)
    if out is None:
        return None
    text = model.config.get_text_config(decoder=True)
    weight = out.base_layer.weight if hasattr(out, "base_layer") else out.weight
    columns = getattr(out, "in_features", weight.shape[-1])
    types = getattr(text, "layer_types", None)
    if isinstance(module, LayerGraftMixer):
        kind = "attention"
    elif types and types[layer] == "linear_attention":  # wherever it is (Kimi Linear has it under self_attn)
        kind = "ssm"
    kind = kind or ("attention" if hasattr(module, "q_proj") else "ssm")
    width = next((int(size) for name in WIDTHS[kind] if (size := getattr(module, name, None))), None)
    if width is None:
        width = 1 if kind == "ssm" else columns // text.num_attention_heads
    if columns % width:
        raise _unknown(model, f"layer {layer}'s {type(module).__name__} has heads of {width} columns, and reads {columns}")
    return MixerPlace(layer, kind, module, out, columns // width, width, first)


def find_cache(output: Any) -> tuple[str, Any]:
    """(what a model calls the cache that it takes and returns, the cache), of an output; ("", None) if it holds none."""
    held = ((name, getattr(output, name, None)) for name in CACHES)
    return next(((name, cache) for name, cache in held if cache is not None), ("", None))


def held_tensors(cache: Any) -> list[Tensor]:
    """All tensors in a cache, each once: in lists, dicts and objects of transformers and of this project."""
    held: dict[tuple[int, int], Tensor] = {}
    seen, pending = set[int](), [cache]
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            held[thing.data_ptr(), thing.numel()] = thing
        elif isinstance(thing, dict | list | tuple):
            pending += thing.values() if isinstance(thing, dict) else thing
        elif type(thing).__module__.startswith(("transformers", "surgery")) and hasattr(thing, "__dict__"):
            pending += vars(thing).values()
    return [*held.values()]


def descend(module: Any, path: str) -> Any:
    """The submodule at a dotted path, or None."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _unknown(model: Any, why: str) -> UserError:
    return UserError(f"cannot analyse a {model.config.model_type} model: {why}; see surgery/models/anatomy.py for layouts")
