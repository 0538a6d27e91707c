"""Reads original state-spaces Mamba-2 folders (state-spaces/mamba2-130m and its kin) into the stock transformers class.

Such a folder holds the arguments of mamba_ssm's own classes in config.json, and a pickle of tensors. The tensors are the same
in both worlds, only the embedding's name differs; the work is in the config. A field that is not understood is refused, because
each of them could change what the model computes.
"""

import math
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Mamba2Config, Mamba2ForCausalLM

from surgery.errors import UserError

FIELDS = {
    *("d_model", "d_intermediate", "n_layer", "vocab_size", "ssm_cfg", "attn_layer_idx", "attn_cfg", "rms_norm"),
    *("residual_in_fp32", "fused_add_norm", "pad_vocab_size_multiple", "tie_embeddings"),
}
# Fields of ssm_cfg that reach the transformers config or are checked to hold the one value that its class computes.
SSM_FIELDS = {
    *("layer", "d_state", "d_conv", "expand", "headdim", "ngroups", "chunk_size", "bias", "conv_bias", "dt_limit", "d_ssm"),
    *("D_has_hdim", "rmsnorm", "norm_before_gate"),
}
# Fields of ssm_cfg that only steer the initialisation or pick a kernel: a trained model computes the same whatever they say.
HARMLESS = {"A_init_range", "conv_init", "dt_min", "dt_max", "dt_init_floor", "use_mem_eff_path", "sequence_parallel"}

EMBEDDING = "backbone.embedding.weight"
HEAD = "lm_head.weight"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def is_original(config: dict[str, Any]) -> bool:
    """Whether the content of a config.json looks like the original layout and not like transformers'."""
    return "d_model" in config and "n_layer" in config and "model_type" not in config


def original_config(config: dict[str, Any]) -> Mamba2Config:
    """The transformers config that computes the same as the original one.

    What is absent has mamba_ssm's default. `vocab_size` is the padded one: the smallest multiple of `pad_vocab_size_multiple`
    that holds the vocabulary. The original names no special tokens; the ids are <|endoftext|> of the GPT-NeoX tokenizer, which
    these models were trained with (the default of the transformers class would end a generation at "!").

    Raises UserError in one line, naming the field, for whatever the transformers class does not compute.
    """
    unknown = sorted(set(config) - FIELDS)
    if unknown:
        raise _refusal(unknown[0], f"{config[unknown[0]]!r} is not handled: the field is unknown")
    ssm = config.get("ssm_cfg") or {}
    if not isinstance(ssm, dict):
        raise _refusal("ssm_cfg", f"must be an object, not {ssm!r}")
    layer = ssm.get("layer", "Mamba1")  # mamba_ssm's default
    if layer == "Mamba1":
        said = "'Mamba1'" if "layer" in ssm else "absent"
        raise _refusal("ssm_cfg.layer", f"is {said}: this is a Mamba-1 checkpoint, which is not supported yet")
    if layer != "Mamba2":
        raise _refusal("ssm_cfg.layer", f"{layer!r} is not handled, only 'Mamba2' is")
    unknown = sorted(set(ssm) - SSM_FIELDS - HARMLESS)
    if unknown:
        raise _refusal(f"ssm_cfg.{unknown[0]}", f"{ssm[unknown[0]]!r} is not handled: the field is unknown")
    if config.get("attn_layer_idx"):
        raise _refusal("attn_layer_idx", f"{config['attn_layer_idx']!r} is not handled: the model has attention layers")
    if config.get("d_intermediate", 0) != 0:
        raise _refusal("d_intermediate", f"{config['d_intermediate']!r} is not handled, only 0 (no MLP layers) is")
    if not _flag(config, "rms_norm", True):
        raise _refusal("rms_norm", "False is not handled: the model has LayerNorm")
    _flag(config, "fused_add_norm", True)  # a kernel's choice, the result is the same
    for name, only in (("D_has_hdim", False), ("rmsnorm", True), ("norm_before_gate", False)):
        if _flag(ssm, name, only, "ssm_cfg.") != only:
            raise _refusal(f"ssm_cfg.{name}", f"{not only} is not handled, only {only} is")

    width, expand = _count(config, "d_model"), _count(ssm, "expand", 2, "ssm_cfg.")
    head_dim, groups = _count(ssm, "headdim", 64, "ssm_cfg."), _count(ssm, "ngroups", 1, "ssm_cfg.")
    inner = expand * width
    if inner % head_dim:
        raise _refusal("ssm_cfg.headdim", f"{head_dim} does not divide expand * d_model = {inner}")
    heads = inner // head_dim
    if heads % groups:
        raise _refusal("ssm_cfg.ngroups", f"{groups} does not divide the number of heads, {heads}")
    if ssm.get("d_ssm") not in (None, inner):
        raise _refusal("ssm_cfg.d_ssm", f"{ssm['d_ssm']!r} is not handled, only expand * d_model = {inner} is")
    pad = _count(config, "pad_vocab_size_multiple", 8)
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        vocab_size=-(-_count(config, "vocab_size") // pad) * pad,
        hidden_size=width,
        state_size=_count(ssm, "d_state", 128, "ssm_cfg."),
        num_hidden_layers=_count(config, "n_layer"),
        layer_norm_epsilon=1e-5,  # mamba_ssm offers no other
        expand=expand,
        conv_kernel=_count(ssm, "d_conv", 4, "ssm_cfg."),
        n_groups=groups,
        use_bias=_flag(ssm, "bias", False, "ssm_cfg."),
        use_conv_bias=_flag(ssm, "conv_bias", True, "ssm_cfg."),
        hidden_act="silu",
        residual_in_fp32=_flag(config, "residual_in_fp32", True),
        time_step_limit=_limit(ssm),
        chunk_size=_count(ssm, "chunk_size", 256, "ssm_cfg."),
        tie_word_embeddings=_flag(config, "tie_embeddings", True),
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def load_original(folder: Path, config: dict[str, Any]) -> Mamba2ForCausalLM:
    """The model of an original folder, in eval mode on the CPU.

    folder: holds model.safetensors, which is preferred, or pytorch_model.bin. config: the content of its config.json. Weights
    keep their dtype; if the file mixes several, all get the smallest that holds each of them exactly. The logits are
    (batch, length, padded vocabulary): ids from the config's `vocab_size` on have rows that were never trained, and are kept.

    The weights are mapped from the file, privately: changing them leaves it alone, but it must stay whole while they are used.

    Raises UserError in one line if the config is not handled, if the file is damaged or holds anything but tensors, and for the
    first tensor that is missing, unexpected, of a wrong shape, or of a dtype that is not a float of 16 or 32 bits.
    """
    model_config = original_config(config)
    path, state = _read(Path(folder))
    with torch.device("meta"):
        model = Mamba2ForCausalLM(model_config)
    tied = model_config.tie_word_embeddings
    expected = {_original_name(name): tensor.shape for name, tensor in model.state_dict().items()}

    for name, shape in expected.items():
        if name not in state:
            if name == HEAD and tied:  # safetensors stores shared memory once
                continue
            raise UserError(f"{path}: the tensor '{name}' is missing")
        if state[name].shape != shape:
            raise UserError(f"{path}: the tensor '{name}' has the shape {tuple(state[name].shape)}, not {tuple(shape)}")
    for name, tensor in state.items():
        if name not in expected:
            raise UserError(f"{path}: the tensor {name!r} is unexpected")
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise UserError(f"{path}: the tensor '{name}' is not a plain float of 16 or 32 bits ({tensor.dtype})")

    embedding, head = state[EMBEDDING], state.get(HEAD)
    if tied:
        if head is not None and head.data_ptr() != embedding.data_ptr() and not torch.equal(head, embedding):
            raise UserError(f"{path}: the tensor '{HEAD}' differs from '{EMBEDDING}', but tie_embeddings is true")
        state[HEAD] = embedding
    elif head is not None and head.data_ptr() == embedding.data_ptr():
        state[HEAD] = head.clone()  # else an optimizer would step the same memory twice

    dtype = next(iter(state.values())).dtype
    for tensor in state.values():
        dtype = torch.promote_types(dtype, tensor.dtype)
    model.load_state_dict({_name(name): tensor.to(dtype) for name, tensor in state.items()}, assign=True)
    if tied:
        model.tie_weights()
    model.config.dtype = dtype
    return model.eval()


def _name(original: str) -> str:
    return "backbone.embeddings.weight" if original == EMBEDDING else original


def _original_name(name: str) -> str:
    return EMBEDDING if name == "backbone.embeddings.weight" else name


def _read(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The file of the weights and its content."""
    path = folder / "model.safetensors"
    if not path.exists():
        path = folder / "pytorch_model.bin"
        if not path.exists():
            raise UserError(f"{folder} holds neither model.safetensors nor pytorch_model.bin")
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            # Files from before torch 1.6 are no zip archives and cannot be mapped.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:  # torch's own text advises to load it without the protection
        raise UserError(f"cannot read {path}: it is damaged, or a pickle of more than tensors; it was not run") from error
    except Exception as error:  # a damaged file raises whatever its bytes lead to
        text = str(error).strip() or type(error).__name__
        raise UserError(f"cannot read {path}: it is damaged ({text.splitlines()[0]})") from error
    if not isinstance(state, dict):
        raise UserError(f"cannot read {path}: it holds a {type(state).__name__}, not a dict of tensors")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UserError(f"cannot read {path}: its entry {name!r} is a {type(tensor).__name__}, not a tensor")
    return path, dict(state)


def _count(fields: dict[str, Any], name: str, default: int | None = None, prefix: str = "") -> int:
    value = fields.get(name, default)
    if value is None and name not in fields:
        raise _refusal(prefix + name, "is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refusal(prefix + name, f"must be a positive whole number, not {value!r}")
    return value


def _flag(fields: dict[str, Any], name: str, default: bool, prefix: str = "") -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise _refusal(prefix + name, f"must be true or false, not {value!r}")
    return value


def _limit(ssm: dict[str, Any]) -> tuple[float, float]:
    """The bounds of the time step. Decoding token by token ignores them, in mamba_ssm as in transformers."""
    value = ssm.get("dt_limit", (0.0, math.inf))
    numbers = isinstance(value, (list, tuple)) and all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in value)
    if not numbers or len(value) != 2 or not 0 <= value[0] <= value[1]:
        raise _refusal("ssm_cfg.dt_limit", f"must be two rising numbers from zero on, not {value!r}")
    return float(value[0]), float(value[1])


def _refusal(field: str, complaint: str) -> UserError:
    return UserError(f"config.json: {field} {complaint}")
