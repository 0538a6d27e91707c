"""Bytes of a sequence's cache and state by length, from a configuration alone.

transformers' cache is measured and not calculated: the first layers, as many as hold each kind once, are made at full width
without values, so that their memory is never touched, and read a few tokens. What a layer of each kind holds then, and how much
more with another token, is added up over all layers. Layers with a sliding window stop growing there.

llama.cpp allocates for a context: keys and values in float16 for as many tokens, in multiples of 256, and states in float32
(llama-hparams.cpp, llama-memory-recurrent.cpp). vLLM allocates pages of one size for all layers: a state takes one, and of
attention a page is a block of as many tokens as make it as large as a state (platforms/interface.py and, for groups of layers,
v1/core/kv_cache_utils.py).
"""

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from surgery.checking.shrink import DEPTHS, LISTS, make_model
from surgery.errors import UserError
from surgery.models.anatomy import find_cache, held_tensors

LENGTHS = (1024, 4096, 16384, 65536, 262144, 1048576)
SHORT = 24  # tokens that are read: more than any short convolution has taps
BLOCK, CONTEXT = 16, 256  # vLLM's blocks and llama.cpp's contexts are multiples of these
# Recurrent model types that engines have code for: vLLM 0.32, and llama.cpp of October 2026.
BOTH = (
    "mamba falcon_mamba mamba2 jamba falcon_h1 nemotron_h granitemoehybrid qwen3_next qwen3_5_text qwen3_5_moe_text "
    "kimi_linear lfm2 lfm2_moe"
).split()
SERVED = {"llama_cpp": {*BOTH, "bamba"}, "vllm": {*BOTH, "zamba2", "olmo_hybrid"}}
# What no cache depends on.
SMALL = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 2),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "topk_group", "n_group", "num_expert_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 64),
}


@dataclass
class LayerBytes:
    """What a layer holds of one sequence. state: bytes of recurrent states, of `numbers` numbers; convolution: of the last
    `taps` inputs of convolutions; token: of the keys and values of a token; window: of how many tokens, if not of all."""

    state: int = 0
    numbers: int = 0
    convolution: int = 0
    taps: int = 1
    token: int = 0
    window: int | None = None

    def at(self, length: int) -> int:
        """Bytes after so many tokens."""
        return self.state + self.convolution + self.token * (length if self.window is None else min(length, self.window))

    def fixed(self, itemsize: int, scale: float = 1.0) -> int:
        """Bytes where an engine holds states in another dtype, and one input of a convolution less. itemsize: of states. scale:
        of the dtype of convolutions to the one here."""
        return self.numbers * itemsize + int(self.convolution * scale * (self.taps - 1) / self.taps)


@dataclass
class CacheBytes:
    """layers: of every layer, in order. dtype: what the model computes in. counters: bytes of the cache's own integers, which
    there are once for all sequences."""

    model_type: str
    dtype: torch.dtype
    layers: list[LayerBytes]
    counters: int = 0

    def transformers(self, length: int, batch: int = 1) -> int:
        """Bytes of the cache of so many sequences of so many tokens."""
        return batch * sum(layer.at(length) for layer in self.layers) + self.counters

    def llama_cpp(self, length: int, batch: int = 1) -> int:
        """What llama.cpp allocates by default for so many sequences of so many tokens each, as one context."""
        size, context = self.dtype.itemsize, -(-length * batch // CONTEXT) * CONTEXT
        states = sum(layer.fixed(4, 4 / size) for layer in self.layers)
        return batch * states + sum(layer.token * 2 // size * context for layer in self.layers)

    def vllm(self, length: int, batch: int = 1) -> int:
        """What vLLM takes from its pool for so many sequences: without prefix caching, states in the model's dtype."""
        size = self.dtype.itemsize
        states = [layer.fixed(size) for layer in self.layers]
        tokens = [layer.token for layer in self.layers if layer.token]
        largest, token = max(states), max(tokens, default=1)
        block = max(BLOCK, -(-largest // (BLOCK * token)) * BLOCK)
        page = block * token if tokens else largest
        kinds = Counter[tuple[str, int | None]]()
        for layer, state in zip(self.layers, states, strict=True):
            kinds.update([("state", None)] * bool(state) + [("tokens", layer.window)] * bool(layer.token))
        least, most = min(kinds.values()), max(kinds.values())
        group = most if most < 1.5 * least else least  # layers that share a table of pages
        blocks = 0
        for (kind, window), count in kinds.items():
            held = length if window is None else min(length, window + block)
            blocks += -(-count // group) * (1 if kind == "state" else -(-held // block))
        return batch * blocks * group * page

    def rows(self, batch: int = 1) -> list[dict[str, int | None]]:
        """Bytes by length, for each who holds them; None for an engine that has no code for a recurrent model type."""
        ways = {"llama_cpp": self.llama_cpp, "vllm": self.vllm}
        attends = not any(layer.state or layer.convolution for layer in self.layers)
        rows: list[dict[str, int | None]] = []
        for length in LENGTHS:
            served = {
                name: find(length, batch) if attends or self.model_type in SERVED[name] else None for name, find in ways.items()
            }
            rows.append({"tokens": length, "transformers": self.transformers(length, batch), **served})
        return rows


def table_of_bytes(sizes: CacheBytes, batch: int = 1) -> str:
    """Lengths against transformers, llama.cpp and vLLM, in MiB."""
    names = {"tokens": 10, "transformers": 14, "llama.cpp": 14, "vLLM": 14}
    lines = ["  ".join(f"{name:>{width}}" for name, width in names.items()) + f"   MiB of {batch} x {sizes.model_type}"]
    for row in sizes.rows(batch):
        told = ["-" if size is None else f"{size / 2**20:,.2f}" for size in list(row.values())[1:]]
        lines.append("  ".join([f"{row['tokens']:>10,}", *(f"{each:>14}" for each in told)]))
    return "\n".join(lines)


def count_cache_bytes(
    source: PreTrainedConfig | PreTrainedModel, dtype: str | None = None, trust_remote_code: bool = False
) -> CacheBytes:
    """Bytes of a model's cache. dtype: what it computes in, by default what its weights are in. Raises UserError where it
    returns no cache."""
    config = source if isinstance(source, PreTrainedConfig) else source.config
    config = copy.deepcopy(config.get_text_config(decoder=True))
    wanted: torch.dtype = getattr(torch, dtype) if dtype else getattr(config, "dtype", None) or torch.float32
    # What each layer is, as far as its cache is concerned. Grafted layers are each a kind of their own.
    depth = next((getattr(config, name) for name in DEPTHS if getattr(config, name, None)), 0)
    lists = [getattr(config, name) for name in LISTS if isinstance(getattr(config, name, None), list)]
    kinds: list[Any] = [str(row) for row in zip(*lists, strict=False)] if lists else [""] * depth
    if getattr(config, "grafts", None):
        kinds = list(range(depth))
    depth = max(kinds.index(kind) for kind in kinds) + 1
    if config.model_type in ("zamba", "zamba2"):  # its hybrid layers share weights: a single one cannot be made
        depth = [place for place, kind in enumerate(kinds) if "hybrid" in kind][1] + 1
    model = _hollow(config, depth, wanted, trust_remote_code)
    first, second = (_measured(model, tokens, depth) for tokens in (SHORT, SHORT + 1))
    for (one, _), (other, _) in zip(first, second, strict=True):
        one.token = other.token - one.token
    layers = [first[kinds.index(kind)] for kind in kinds] + first[depth:]
    return CacheBytes(config.model_type, wanted, [layer for layer, _ in layers], sum(integers for _, integers in layers))


def _hollow(config: Any, depth: int, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The first layers of a model, whose weights take no memory as long as nobody writes them."""
    small = SMALL | ({"intermediate_size": 64} if hasattr(config, "num_attention_heads") else {})  # of MLPs, not of mixers
    for name, value in small.items():
        if isinstance(getattr(config, name, None), int) and getattr(config, name):
            setattr(config, name, value)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)
    fields = {name for name in DEPTHS if hasattr(config, name)}
    for name in LISTS:
        if isinstance(getattr(config, name, None), list):
            try:
                setattr(config, name, getattr(config, name)[:depth])
            except AttributeError:  # it follows from other fields
                continue
    for name in fields:
        try:
            setattr(config, name, depth)
        except (AttributeError, NotImplementedError):
            continue
    with torch.device("meta"), no_init_weights():
        model = make_model(config, trust_remote_code, dtype=dtype)
    return model.to_empty(device="cpu").eval()


@torch.no_grad()
def _measured(model: Any, tokens: int, depth: int) -> list[tuple[LayerBytes, int]]:
    """What each layer of the cache holds after so many tokens, `token` standing for all of them; and bytes of its integers."""
    kept = model.config.model_type == "recurrent_gemma"  # its states in its modules, and the cache of keys is not returned
    given: dict[str, Any] = {"past_key_values": DynamicCache(config=model.config)} if kept else {}
    try:
        output = model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=True, **given)
    except (RuntimeError, ValueError) as error:
        said = f"a {model.config.model_type} cannot be run with a cache in {model.dtype}: {str(error).splitlines()[0]}"
        raise UserError(said + "; try another --dtype" * ("dtype" in said)) from error
    _, cache = find_cache(output)
    if kept:
        cache = given["past_key_values"]
        for layer, block in zip(cache.layers, (each.temporal_block for each in model.model.layers), strict=True):
            if hasattr(block, "rg_lru"):
                layer.conv_states, layer.recurrent_states = {0: block.conv1d_state}, {0: block.rg_lru.recurrent_states}
    if cache is None:
        raise UserError(f"a {model.config.model_type} returns no cache, and what it keeps elsewhere is not known here")
    if not hasattr(cache, "layers"):  # one of the model's own: states of all layers together, and integers that there are once
        held = held_tensors(cache)
        size, numbers = _size(held), sum(t.numel() for t in held if t.is_floating_point())
        return [(LayerBytes(size // depth, numbers // depth), 0)] * depth + [(LayerBytes(), _size(held, False))]
    linear = getattr(cache, "linear_cache", [])
    own = [vars(layer) for layer in cache.layers] + [{}] * (len(linear) - len(cache.layers))
    return [_layer(held, linear[place] if place < len(linear) else []) for place, held in enumerate(own)]


def _layer(held: dict[str, Any], linear: Any) -> tuple[LayerBytes, int]:
    """held: the attributes of a cache's layer. linear: MiniMax's states."""
    convolutions = held_tensors(held.get("conv_states", {}))
    states = [*held_tensors(held.get("recurrent_states", {})), *held_tensors(linear)]
    grown = [value for name, value in held.items() if name in ("keys", "values", "indexer_keys") and isinstance(value, Tensor)]
    window = held.get("sliding_window")
    layer = LayerBytes(
        state=_size(states),
        numbers=sum(t.numel() for t in states),
        convolution=_size(convolutions),
        taps=max((t.shape[-1] for t in convolutions), default=1),
        token=sum(t.nbytes for t in grown),
        window=None if window is None else window - 1,
    )
    rest = [value for value in held.values() if isinstance(value, Tensor) and not any(value is each for each in grown)]
    return layer, _size(rest, False)


def _size(tensors: list[Tensor], floating: bool = True) -> int:
    return sum(t.nbytes for t in tensors if t.is_floating_point() == floating)
