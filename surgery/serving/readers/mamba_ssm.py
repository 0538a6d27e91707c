"""Reads original state-spaces folders (state-spaces/mamba-130m, state-spaces/mamba2-130m and their kin) into the stock
transformers classes, and those with attention layers (state-spaces/mamba2attn-2.7b) into hybrids.

Such a folder holds the arguments of mamba_ssm's own classes in config.json (serving/original_config.py reads them), and
tensors (serving/original_files.py). The tensors are the same in both worlds; the embedding's name differs, and an attention
layer holds its queries, keys and values in one.
"""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from surgery.errors import UserError
from surgery.serving.original_config import original_config
from surgery.serving.original_files import read_weights

LAYERS = "n_layer"
TOKENIZER = "EleutherAI/gpt-neox-20b"  # of the state-spaces models, whose folders do not hold it

# What mamba_ssm's MHA calls the projections of a layer graft.
GRAFT = {"q_proj": "in_proj", "k_proj": "in_proj", "v_proj": "in_proj", "o_proj": "out_proj", "qkv_conv": "conv1d"}
EMBEDDING = "backbone.embedding.weight"
HEAD = "lm_head.weight"
GENERATION = "generation_config.json"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def reads(content: dict[str, Any]) -> bool:
    """Whether the content of a config.json looks like the original layout and not like transformers'."""
    return "d_model" in content and LAYERS in content and "model_type" not in content


config_of = original_config


def original_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """The original name of every tensor -> the model's names of the tensors that lie in it, one below the other."""
    names: dict[str, list[str]] = {}
    for name in model.state_dict():
        original = re.sub(r"\.graft\.(\w+)\.", lambda match: f".{GRAFT[match[1]]}.", name)
        names.setdefault(EMBEDDING if original == "backbone.embeddings.weight" else original, []).append(name)
    return names


def load_folder(folder: Path, content: dict[str, Any], dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model of an original folder, in eval mode on the CPU.

    folder: holds the weights as safetensors, which are preferred, or as a pickle, in one file or in shards with an index.
    content: of its config.json. dtype: what the weights become; None keeps theirs, and if the files mix several, all
    get the smallest that holds each of them exactly. The logits are (batch, length, padded vocabulary): ids from the config's
    `vocab_size` on have rows that were never trained, and are kept.

    Special tokens are those of generation_config.json, should there be one (our own export writes it, the original does not).

    The weights are mapped from the files, privately: changing them leaves the files alone, but they must stay whole while they
    are used. Only tensors of another dtype than the wanted one are copies, made one by one.

    Raises UserError in one line if the config is not handled, if a file is damaged or holds anything but tensors, and for the
    first tensor that is missing, unexpected, of a wrong shape, or of a dtype that is not a float of 16 or 32 bits.
    """
    model_config = original_config(content)
    path, state = read_weights(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    tied = model_config.tie_word_embeddings
    empty, expected = model.state_dict(), original_names(model)

    for name, parts in expected.items():
        shape = (sum(len(empty[part]) for part in parts), *empty[parts[0]].shape[1:])
        if name not in state:
            if name == HEAD and tied:  # safetensors stores shared memory once
                continue
            raise UserError(f"{path}: the tensor '{name}' is missing")
        if state[name].shape != shape:
            raise UserError(f"{path}: the tensor '{name}' has the shape {tuple(state[name].shape)}, not {shape}")
    stored: torch.dtype | None = None
    for name, tensor in state.items():
        if name not in expected:
            raise UserError(f"{path}: the tensor {name!r} is unexpected")
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise UserError(f"{path}: the tensor '{name}' is not a plain float of 16 or 32 bits ({tensor.dtype})")
        stored = torch.promote_types(stored or tensor.dtype, tensor.dtype)
    if tied:
        _drop_head(state, path)

    # What is converted leaves `state`, so that a file which could not be mapped is not held twice.
    tensors = {name: state.pop(name).to(dtype or stored) for name in list(state)}
    if tied:
        tensors[HEAD] = tensors[EMBEDDING]
    elif tensors[HEAD].data_ptr() == tensors[EMBEDDING].data_ptr():
        tensors[HEAD] = tensors[HEAD].clone()  # else an optimizer would step the same memory twice
    named: dict[str, torch.Tensor] = {}
    for name, parts in expected.items():
        rows = tensors[name].split([len(empty[part]) for part in parts])
        named |= zip(parts, rows, strict=True)
    model.load_state_dict(named, assign=True)
    if tied:
        model.tie_weights()
    model.config.dtype = dtype or stored
    if (folder / GENERATION).exists():
        _take_tokens(model, folder)
    return model.eval()


def _take_tokens(model: Any, folder: Path) -> None:
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot read {folder / GENERATION}: {str(error).strip().splitlines()[0]}") from error
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, getattr(model.generation_config, name))


def _drop_head(state: dict[str, torch.Tensor], path: Path) -> None:
    """Take the head out of tensors that hold it as the embedding, or refuse them if it is another one."""
    head, embedding = state.pop(HEAD, None), state[EMBEDDING]
    if head is not None and head.data_ptr() != embedding.data_ptr() and not torch.equal(head, embedding):
        raise UserError(f"{path}: the tensor '{HEAD}' differs from '{EMBEDDING}', but tie_embeddings is true")
