"""A folder of random weights in the shape of a published model, on the disk as that one lies there.

Shards are filled and written one by one, so that a model of any size takes the memory of one shard. What is drawn keeps
activations finite through any number of layers: a matrix keeps the size of what it reads, and those that write to the residual
stream are scaled by 1 / sqrt(2 layers), as the published models were at their start. Such a model knows nothing; it costs what
the published one costs.
"""

import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from surgery.families import register
from surgery.serving.original_config import original_config
from surgery.serving.readers.mamba_ssm import original_names
from surgery.world.tokenizer import build_tokenizer
from tools.published import is_original

SHARD = "4GB"
BLOCK = 8_388_593  # the largest prime below 2**23
OUTPUTS = ("out_proj", "o_proj", "down_proj")  # what a block adds to the residual stream


def write(
    config: dict[str, Any], folder: Path, *, dtype: str, tokenizer: Path | None = None, shard: str = SHARD, seed: int = 0
) -> int:
    """Write config.json, weights and tokenizer; returns the bytes of the weights.

    tokenizer: a folder that holds one, or a tokenizer.json; by default the built-in one, filled up to the vocabulary. An
    original folder and a published Llamba bring no tokenizer: theirs is in the folder `tokenizer` within.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_stored_in(config, dtype), indent=2))
    original = is_original(config)
    model = _empty(folder, config)
    size = _write_weights(model, folder, getattr(torch, dtype), original, shard, seed)
    apart = original or model.config.model_type == "llamba"
    words = tokenizer_of(tokenizer, model.config.vocab_size)
    words.save_pretrained(folder / "tokenizer" if apart else folder)
    return size


def tokenizer_in(folder: Path) -> Path:
    """Where the tokenizer of such a folder is."""
    return folder / "tokenizer" if (folder / "tokenizer").exists() else folder


def _stored_in(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    return config | {name: dtype for name in ("torch_dtype", "dtype") if name in config}


def _empty(folder: Path, config: dict[str, Any]) -> Any:
    """The stock model on the meta device."""
    register()  # of Llamba, which transformers does not know
    fields = original_config(config) if is_original(config) else AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(fields)


def parameters(config: dict[str, Any], folder: Path) -> int:
    """How many numbers the weights of a model are, tied ones once. folder: holds its config.json."""
    return sum(tensor.numel() for tensor in _empty(folder, config).parameters())


def _write_weights(model: Any, folder: Path, dtype: torch.dtype, original: bool, shard: str, seed: int) -> int:
    saved = model.state_dict()
    empty = dict(model.named_parameters())  # tied ones once
    empty |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    if original:
        empty = {name: empty[parts[0]] for name, parts in original_names(model).items() if parts[0] in empty}
    stem, suffix, put = ("pytorch_model", "bin", torch.save) if original else ("model", "safetensors", _save)
    plan = split_state_dict_into_shards_factory(
        {name: tensor.to(dtype) for name, tensor in empty.items()}, filename_pattern=f"{stem}{{suffix}}.{suffix}",
        max_shard_size=shard, get_storage_size=lambda tensor: tensor.numel() * tensor.element_size(),
        get_storage_id=lambda tensor: None,
    )  # fmt: skip
    layers = model.config.num_hidden_layers
    for file, tensors in plan.filename_to_tensors.items():
        put({name: drawn(name, tuple(empty[name].shape), layers, seed).to(dtype) for name in tensors}, folder / file)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index, indent=2))
    return sum(tensor.numel() for tensor in empty.values()) * dtype.itemsize


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def drawn(name: str, shape: tuple[int, ...], layers: int, seed: int = 0) -> Tensor:
    """The values of a tensor, in float32; the same for a name, a shape and a seed."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return torch.from_numpy(_values(name.split("."), shape, layers, rng).astype(np.float32, copy=False))


def _values(name: list[str], shape: tuple[int, ...], layers: int, rng: np.random.Generator) -> np.ndarray:
    *_, module, leaf = ["", *name]
    uniform: Callable[..., np.ndarray] = rng.uniform
    if leaf == "dt_bias" or (module, leaf) == ("dt_proj", "bias"):  # so that softplus of it is a time step from .001 to .1
        step = np.exp(uniform(math.log(1e-3), math.log(1e-1), shape))
        return step + np.log(-np.expm1(-step))
    if leaf == "A_log":
        return (
            np.log(uniform(1, 16, shape))
            if len(shape) == 1
            else np.broadcast_to(np.log(np.arange(1, shape[1] + 1)), shape).copy()
        )
    if "bias" in leaf:
        return np.zeros(shape)
    if len(shape) == 1:  # D, and the weights of norms
        return np.ones(shape)
    if len(shape) == 3:  # a convolution over time
        return uniform(-1, 1, shape) / math.sqrt(shape[-1])
    if module in ("embedding", "embeddings", "embed_tokens", "lm_head"):
        deviation = 0.02
    else:
        deviation = 1 / math.sqrt(shape[-1]) / (math.sqrt(2 * layers) if module in OUTPUTS else 1)
    size = math.prod(shape)
    # Drawing seven billion numbers takes minutes. What is longer than BLOCK repeats it; the length is prime, so no two rows are
    # the same.
    values = np.resize(rng.standard_normal(min(size, BLOCK), dtype=np.float32), size)
    values *= deviation
    return values.reshape(shape)


def tokenizer_of(source: Path | None, vocabulary: int) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or of a tokenizer.json; or the built-in one, with entries that no text leads to up to the size
    of the vocabulary, so that tables of all tokens have their published size."""
    if source is not None and source.is_dir():
        return AutoTokenizer.from_pretrained(source)
    if source is not None:
        return PreTrainedTokenizerFast(tokenizer_file=str(source), bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    words = build_tokenizer()
    settings = json.loads(words.backend_tokenizer.to_str())
    known = settings["model"]["vocab"]
    known |= {f"<unused {i}>": i for i in range(len(words), vocabulary)}
    filled = type(words.backend_tokenizer).from_str(json.dumps(settings))
    end = words.eos_token
    return PreTrainedTokenizerFast(tokenizer_object=filled, bos_token=end, eos_token=end, pad_token=end, padding_side="left")
