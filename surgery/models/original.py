"""Reads original state-spaces folders (state-spaces/mamba-130m, state-spaces/mamba2-130m and their kin) into transformers'
classes, and those with attention layers (state-spaces/mamba2attn-2.7b) into hybrids with layer grafts.

config.json holds the arguments of mamba_ssm's own classes. Each of them could change what the model computes, so one that is
not understood is refused. The tensors are the same in both worlds; the embedding has another name, and an attention layer holds
its queries, keys and values in one matrix.
"""

import json
import math
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, Mamba2Config, MambaConfig

from surgery.errors import UserError

TOKENIZER = "EleutherAI/gpt-neox-20b"  # of the state-spaces models, whose folders do not hold it
# Fields that are read, and those about the file or the kernels.
FIELDS = set(
    """
    d_model d_intermediate n_layer vocab_size ssm_cfg attn_layer_idx attn_cfg rms_norm residual_in_fp32 fused_add_norm
    pad_vocab_size_multiple tie_embeddings architectures dtype torch_dtype transformers_version _name_or_path name_or_path
    """.split()
)
# Of ssm_cfg, for both mixers: those that are read, and those of the initialisation and of a module's place.
OF_SSM = set(
    """
    layer d_state d_conv expand bias conv_bias dt_min dt_max dt_init_floor layer_idx process_group device dtype
    """.split()
)
OF_MAMBA1 = OF_SSM | {"dt_rank", "dt_init", "dt_scale", "use_fast_path"}
OF_MAMBA2 = OF_SSM | set(
    """
    headdim ngroups chunk_size dt_limit d_ssm D_has_hdim rmsnorm norm_before_gate A_init_range conv_init use_mem_eff_path
    sequence_parallel
    """.split()
)
OF_ATTENTION = set(
    """
    causal num_heads num_heads_kv head_dim mlp_dim qkv_proj_bias out_proj_bias softmax_scale d_conv rotary_emb_dim
    rotary_emb_base rotary_emb_interleaved
    """.split()
)
# What mamba_ssm's MHA calls the projections of a layer graft.
MHA = {"q_proj": "in_proj", "k_proj": "in_proj", "v_proj": "in_proj", "o_proj": "out_proj", "qkv_conv": "conv1d"}
EMBEDDING, HEAD = "backbone.embedding.weight", "lm_head.weight"


def is_original(content: dict[str, Any]) -> bool:
    """Whether the content of a config.json has the original layout and not transformers'."""
    return "d_model" in content and "n_layer" in content and "model_type" not in content


def read(folder: Path, content: dict[str, Any], dtype: torch.dtype | None = None) -> Any:
    """The model of an original folder, in eval mode on the CPU.

    content: of its config.json. dtype: of the weights; None keeps theirs, and if the files mix several, takes the smallest that
    holds each of them exactly. Tensors are mapped from their files, so these must stay whole while the model is used. Raises
    UserError for whatever is not understood, missing, unexpected or of another shape.
    """
    config = make_config(content)
    path, state = read_weights(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied, empty = config.tie_word_embeddings, model.state_dict()
    parts: dict[str, list[str]] = {}  # of an original tensor, the model's tensors that lie in it, one below the other
    for name in empty:
        original = re.sub(r"\.graft\.(\w+)\.", lambda match: f".{MHA[match[1]]}.", name)
        parts.setdefault(EMBEDDING if name == "backbone.embeddings.weight" else original, []).append(name)
    if tied and EMBEDDING in state and HEAD in state and not torch.equal(state.pop(HEAD), state[EMBEDDING]):
        raise UserError(f"{path}: the tensor '{HEAD}' differs from '{EMBEDDING}', but tie_embeddings is true")
    if tied:
        parts.pop(HEAD, None)
    stored: torch.dtype | None = None
    for name in [*parts, *state]:
        if name not in parts or name not in state:
            raise UserError(f"{path}: the tensor '{name}' is {'unexpected' if name in state else 'missing'}")
        shape = (sum(len(empty[part]) for part in parts[name]), *empty[parts[name][0]].shape[1:])
        if state[name].shape != shape:
            raise UserError(f"{path}: the tensor '{name}' has the shape {tuple(state[name].shape)}, not {shape}")
        if state[name].dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UserError(f"{path}: the tensor '{name}' is not of 16 or 32 bits, but {state[name].dtype}")
        stored = torch.promote_types(stored or state[name].dtype, state[name].dtype)
    named: dict[str, Tensor] = {}
    for name, pieces in parts.items():
        rows = state.pop(name).to(dtype or stored).split([len(empty[piece]) for piece in pieces])
        named |= zip(pieces, rows, strict=True)
    if tied:
        named[HEAD] = named["backbone.embeddings.weight"]
    model.load_state_dict(named, assign=True)
    if tied:
        model.tie_weights()
    model.config.dtype = dtype or stored
    if (folder / "generation_config.json").exists():  # of our own exports: the original names no special tokens
        model.generation_config = GenerationConfig.from_pretrained(folder)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(model.config, name, getattr(model.generation_config, name))
    return model.eval()


def make_config(content: dict[str, Any]) -> Any:
    """The configuration that computes the same as an original one; a hybrid's where `attn_layer_idx` names layers.

    What is absent has mamba_ssm's default. `vocab_size` becomes the padded one. The ids of special tokens are <|endoftext|> of
    the GPT-NeoX tokenizer. Raises UserError, naming the field, for whatever transformers' classes do not compute.
    """
    refuse_unknown(content, FIELDS, "")
    ssm = content.get("ssm_cfg") or {}
    if not isinstance(ssm, dict) or ssm.get("layer", "Mamba1") not in ("Mamba1", "Mamba2"):
        raise _refusal("ssm_cfg", f"{str(ssm)[:60]} is not handled, only those of the layers 'Mamba1' and 'Mamba2' are")
    is_mamba2 = ssm.get("layer", "Mamba1") == "Mamba2"
    refuse_unknown(ssm, OF_MAMBA2 if is_mamba2 else OF_MAMBA1, "ssm_cfg.")
    if content.get("d_intermediate") not in (None, 0):
        raise _refusal("d_intermediate", f"{content['d_intermediate']!r} is not handled, only 0 (no MLP layers) is")
    if not _flag(content, "rms_norm", True):
        raise _refusal("rms_norm", "False is not handled: the model has LayerNorm")
    pad = _count(content, "pad_vocab_size_multiple", 8)
    shared: dict[str, Any] = {
        "vocab_size": -(-_count(content, "vocab_size") // pad) * pad,
        "hidden_size": _count(content, "d_model"),
        "num_hidden_layers": _count(content, "n_layer"),
        "layer_norm_epsilon": 1e-5,  # mamba_ssm offers no other
        "expand": _count(ssm, "expand", 2),
        "conv_kernel": _count(ssm, "d_conv", 4),
        "use_bias": _flag(ssm, "bias", False),
        "use_conv_bias": _flag(ssm, "conv_bias", True),
        "hidden_act": "silu",
        "residual_in_fp32": _flag(content, "residual_in_fp32", True),
        "tie_word_embeddings": _flag(content, "tie_embeddings", True),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    }
    kind: type = Mamba2Config if is_mamba2 else MambaConfig
    if content.get("attn_layer_idx"):
        from surgery.modeling import FAMILIES

        kind = FAMILIES["mamba2" if is_mamba2 else "mamba"].hybrid.config_class
        shared["grafts"] = read_attention(content, shared["hidden_size"], shared["num_hidden_layers"])
    if is_mamba2:
        return kind(**shared, **_of_mamba2(ssm, shared["expand"] * shared["hidden_size"]))
    rank = ssm.get("dt_rank", "auto")
    rank = rank if rank == "auto" else _count(ssm, "dt_rank")
    return kind(**shared, state_size=_count(ssm, "d_state", 16), time_step_rank=rank)


def _of_mamba2(ssm: dict[str, Any], inner: int) -> dict[str, Any]:
    for name, only in (("D_has_hdim", False), ("rmsnorm", True), ("norm_before_gate", False)):
        if _flag(ssm, name, only) != only:
            raise _refusal(name, f"{not only} is not handled, only {only} is")
    head_dim, groups = _count(ssm, "headdim", 64), _count(ssm, "ngroups", 1)
    if inner % head_dim or inner // head_dim % groups or ssm.get("d_ssm") not in (None, inner):
        raise _refusal("ssm_cfg", f"headdim {head_dim}, ngroups {groups} and d_ssm do not divide expand * d_model = {inner}")
    limit = ssm.get("dt_limit", (0.0, math.inf))
    if not isinstance(limit, list | tuple) or len(limit) != 2 or not 0 <= limit[0] <= limit[1]:
        raise _refusal("dt_limit", f"must be two rising numbers from zero on, not {limit!r}")
    return {
        "num_heads": inner // head_dim,
        "head_dim": head_dim,
        "state_size": _count(ssm, "d_state", 128),
        "n_groups": groups,
        "time_step_limit": (float(limit[0]), float(limit[1])),
        "chunk_size": _count(ssm, "chunk_size", 256),
    }


def read_attention(content: dict[str, Any], hidden_size: int, layers: int) -> list[dict[str, Any]]:
    """The entries of a hybrid configuration's `grafts` for the attention layers, which are all alike and belong to the base.

    The MHA's own defaults are not causal and biased, so a config that says nothing about that is refused, or biased.
    """
    where = content["attn_layer_idx"]
    attn = {name: value for name, value in (content.get("attn_cfg") or {}).items() if value is not None}
    if not isinstance(where, list) or len(set(where)) < len(where) or not set(where) <= set(range(layers)):
        raise _refusal("attn_layer_idx", f"must be a list of different layers from 0 to {layers - 1}, not {where!r}")
    refuse_unknown(attn, OF_ATTENTION, "attn_cfg.")
    for name, default, only in (("causal", False, True), ("rotary_emb_interleaved", False, False)):
        if _flag(attn, name, default) != only:
            raise _refusal(name, f"{not only} is not handled, only {only} is")
    if _count(attn, "mlp_dim", 0, least=0):
        raise _refusal("mlp_dim", f"{attn['mlp_dim']!r} is not handled, only 0 (no MLP beside the attention) is")
    heads = _count(attn, "num_heads")
    groups, width = _count(attn, "num_heads_kv", heads), _count(attn, "head_dim", hidden_size // heads)
    turned, conv = _count(attn, "rotary_emb_dim", 0, least=0), _count(attn, "d_conv", 0, least=0)
    if heads % groups or turned % 2 or turned > width or ("head_dim" not in attn and hidden_size % heads):
        raise _refusal("attn_cfg", f"{heads} heads of width {width}, {groups} of keys and {turned} turned do not fit together")
    qkv = ("q_proj", "k_proj", "v_proj") if _flag(attn, "qkv_proj_bias", True) else ()
    out = ("o_proj",) if _flag(attn, "out_proj_bias", True) else ()
    entry = {
        "kind": "layer",
        "num_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": width,
        "scale": float(attn.get("softmax_scale", width**-0.5)),
        "rope": {"dim": turned, "theta": float(attn.get("rotary_emb_base", 10000.0))} if turned else None,
        "qk_norm": None,
        "conv": conv,
        "bias": sorted((*qkv, *out, *(["qkv_conv"] if conv else []))),
        "of_base": True,
    }
    return [{**entry, "layer": layer} for layer in sorted(where)]


def read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file of the weights, or its index, and all tensors by name. Raises UserError if there is none, and if one is damaged
    or holds anything but tensors."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        path, index = folder / name, folder / f"{name}.index.json"
        if path.exists():
            return path, _read_file(path)
        if index.exists():
            tensors: dict[str, Tensor] = {}
            for shard, names in read_index(index).items():
                held = _read_file(folder / shard)
                if strays := sorted(held.keys() ^ names):
                    raise UserError(f"{index}: the tensor '{strays[0]}' is in the index or in the shard '{shard}', not in both")
                tensors |= held
            return index, tensors
    raise UserError(f"{folder} holds neither model.safetensors nor pytorch_model.bin, nor an index of either")


def read_index(index: Path) -> dict[str, set[str]]:
    """Shard -> the names of its tensors. Raises UserError for an index that is damaged or leads to anything but files of its
    kind beside it."""
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        shards: dict[str, set[str]] = {}
        for name, shard in weight_map.items():
            shards.setdefault(shard, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is no index of weights: it has no weight_map") from error
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or Path(shard).suffix != suffix:
            raise UserError(f"{index}: {shard!r} is not the name of a {suffix} file in the same folder")
        if not (index.parent / shard).is_file():
            raise UserError(f"{index}: the shard '{shard}' is missing")
    return shards


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # Files from before torch 1.6 are no zip archives and cannot be mapped.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged file raises whatever its bytes lead to; torch would advise to run the pickle
        reason = "it is damaged, or holds more than tensors; nothing in it was run"
        raise UserError(f"cannot read {path}: {reason}") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise UserError(f"cannot read {path}: it holds more than tensors by name")
    return state


def refuse_unknown(fields: dict[str, Any], known: set[str], prefix: str) -> None:
    """Raise UserError for a field that could change what the model computes."""
    for name, value in fields.items():
        if name not in known and value not in (None, {}, [], 0):
            raise _refusal(prefix + name, f"{str(value)[:40]!r} is not handled: the field is unknown")


def _count(fields: dict[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    value = fields.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _refusal(name, f"must be a whole number from {least} on, not {value!r}")
    return value


def _flag(fields: dict[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise _refusal(name, f"must be true or false, not {value!r}")
    return value


def _refusal(field: str, complaint: str) -> UserError:
    return UserError(f"config.json: {field} {complaint}")
