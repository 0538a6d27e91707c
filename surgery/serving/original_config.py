"""The config.json of an original state-spaces folder, as the config that computes the same: transformers' own, or, where some
layers are attention (state-spaces/mamba2attn-2.7b), a hybrid's with a layer graft for each of them.

It holds the arguments of mamba_ssm's own classes. A field that is not understood is refused, because each of them could change
what the model computes.
"""

import math
from typing import Any

from transformers import Mamba2Config, MambaConfig

from surgery.errors import UserError
from surgery.families.mamba import MambaHybridConfig
from surgery.families.mamba2 import Mamba2HybridConfig
from surgery.hybrids.layer_graft import layer_spec

FIELDS = {
    *("d_model", "d_intermediate", "n_layer", "vocab_size", "ssm_cfg", "attn_layer_idx", "attn_cfg", "rms_norm"),
    *("residual_in_fp32", "fused_add_norm", "pad_vocab_size_multiple", "tie_embeddings"),
}
# What those who save with transformers' tools leave beside them: about the file, not the function.
NOTES = {"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "name_or_path"}
# Fields of ssm_cfg, by mixer, that reach the transformers config or are checked to hold the one value that its class computes.
SSM_FIELDS = {
    "Mamba1": {"layer", "d_state", "d_conv", "expand", "dt_rank", "bias", "conv_bias"},
    "Mamba2": {
        *("layer", "d_state", "d_conv", "expand", "headdim", "ngroups", "chunk_size", "bias", "conv_bias", "dt_limit", "d_ssm"),
        *("D_has_hdim", "rmsnorm", "norm_before_gate"),
    },
}
# Those that only steer the initialisation or pick a kernel: a trained model computes the same whatever they say.
HARMLESS = {
    "Mamba1": {"dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "use_fast_path"},
    "Mamba2": {"A_init_range", "conv_init", "dt_min", "dt_max", "dt_init_floor", "use_mem_eff_path", "sequence_parallel"},
}
# Arguments of a module and not of a model. null is what a dump of all of them holds.
UNSET = {"layer_idx", "process_group", "device", "dtype"}
# Arguments of mamba_ssm's MHA, the mixer of all layers in attn_layer_idx.
ATTN_FIELDS = {
    *("causal", "num_heads", "num_heads_kv", "head_dim", "mlp_dim", "qkv_proj_bias", "out_proj_bias", "softmax_scale"),
    *("d_conv", "rotary_emb_dim", "rotary_emb_base", "rotary_emb_interleaved"),
}
SSM, ATTN = "ssm_cfg.", "attn_cfg."


def original_config(config: dict[str, Any]) -> MambaConfig | Mamba2Config:
    """The config that computes the same as the original one; one with `grafts` where `attn_layer_idx` names layers.

    What is absent has mamba_ssm's default; the folders of 2023 know no other mixer than Mamba-1 and do not name it.
    `vocab_size` is the padded one: the smallest multiple of `pad_vocab_size_multiple` that holds the vocabulary. The original
    names no special tokens; the ids are <|endoftext|> of the GPT-NeoX tokenizer, which these models were trained with (the
    default of transformers' Mamba-2 class would end a generation at "!").

    Raises UserError in one line, naming the field, for whatever the class of the config does not compute.
    """
    unknown = sorted(set(config) - FIELDS - NOTES)
    if unknown:
        raise _refusal(unknown[0], f"{config[unknown[0]]!r} is not handled: the field is unknown")
    ssm = config.get("ssm_cfg") or {}
    if not isinstance(ssm, dict):
        raise _refusal("ssm_cfg", f"must be an object, not {ssm!r}")
    layer = ssm.get("layer", "Mamba1")
    ssm = {name: value for name, value in ssm.items() if name not in UNSET or value is not None}
    if layer not in list(SSM_FIELDS):
        raise _refusal("ssm_cfg.layer", f"{layer!r} is not handled, only 'Mamba1' and 'Mamba2' are")
    unknown = sorted(set(ssm) - SSM_FIELDS[layer] - HARMLESS[layer])
    if unknown:
        raise _refusal(SSM + unknown[0], f"{ssm[unknown[0]]!r} is not handled: the field is unknown for the layer {layer}")
    if config.get("d_intermediate", 0) != 0:
        raise _refusal("d_intermediate", f"{config['d_intermediate']!r} is not handled, only 0 (no MLP layers) is")
    if not _flag(config, "rms_norm", True):
        raise _refusal("rms_norm", "False is not handled: the model has LayerNorm")
    _flag(config, "fused_add_norm", True)  # a kernel's choice, the result is the same

    pad = _count(config, "pad_vocab_size_multiple", 8)
    shared: dict[str, Any] = {
        "vocab_size": -(-_count(config, "vocab_size") // pad) * pad,
        "hidden_size": _count(config, "d_model"),
        "num_hidden_layers": _count(config, "n_layer"),
        "layer_norm_epsilon": 1e-5,  # mamba_ssm offers no other
        "expand": _count(ssm, "expand", 2, SSM),
        "conv_kernel": _count(ssm, "d_conv", 4, SSM),
        "use_bias": _flag(ssm, "bias", False, SSM),
        "use_conv_bias": _flag(ssm, "conv_bias", True, SSM),
        "hidden_act": "silu",
        "residual_in_fp32": _flag(config, "residual_in_fp32", True),
        "tie_word_embeddings": _flag(config, "tie_embeddings", True),
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if config.get("attn_layer_idx"):
        shared["grafts"] = _grafts(config, shared["hidden_size"], shared["num_hidden_layers"])
    return _mamba2(ssm, shared) if layer == "Mamba2" else _mamba1(ssm, shared)


def _mamba1(ssm: dict[str, Any], shared: dict[str, Any]) -> MambaConfig:
    """shared: the fields that all classes have."""
    rank = ssm.get("dt_rank", "auto")  # the same word, and the same meaning, in transformers
    return (MambaHybridConfig if "grafts" in shared else MambaConfig)(
        **shared,
        state_size=_count(ssm, "d_state", 16, SSM),
        time_step_rank=rank if rank == "auto" else _count(ssm, "dt_rank", prefix=SSM),
    )


def _mamba2(ssm: dict[str, Any], shared: dict[str, Any]) -> Mamba2Config:
    for name, only in (("D_has_hdim", False), ("rmsnorm", True), ("norm_before_gate", False)):
        if _flag(ssm, name, only, SSM) != only:
            raise _refusal(SSM + name, f"{not only} is not handled, only {only} is")
    head_dim, groups = _count(ssm, "headdim", 64, SSM), _count(ssm, "ngroups", 1, SSM)
    inner = shared["expand"] * shared["hidden_size"]
    if inner % head_dim:
        raise _refusal("ssm_cfg.headdim", f"{head_dim} does not divide expand * d_model = {inner}")
    heads = inner // head_dim
    if heads % groups:
        raise _refusal("ssm_cfg.ngroups", f"{groups} does not divide the number of heads, {heads}")
    if ssm.get("d_ssm") not in (None, inner):
        raise _refusal("ssm_cfg.d_ssm", f"{ssm['d_ssm']!r} is not handled, only expand * d_model = {inner} is")
    return (Mamba2HybridConfig if "grafts" in shared else Mamba2Config)(
        **shared,
        num_heads=heads,
        head_dim=head_dim,
        state_size=_count(ssm, "d_state", 128, SSM),
        n_groups=groups,
        time_step_limit=_limit(ssm),
        chunk_size=_count(ssm, "chunk_size", 256, SSM),
    )


def _grafts(config: dict[str, Any], hidden_size: int, layers: int) -> list[dict[str, Any]]:
    """The entries of a hybrid configuration's `grafts` for the attention layers, which are all alike.

    The MHA's own defaults are not causal and biased, so a config that says nothing about that is refused, or biased.
    """
    where, attn = config["attn_layer_idx"], config.get("attn_cfg") or {}
    numbers = isinstance(where, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in where)
    if not numbers or len(set(where)) < len(where) or not set(where) <= set(range(layers)):
        raise _refusal("attn_layer_idx", f"must be a list of different layers from 0 to {layers - 1}, not {where!r}")
    if not isinstance(attn, dict):
        raise _refusal("attn_cfg", f"must be an object, not {attn!r}")
    if unknown := sorted(set(attn) - ATTN_FIELDS):
        raise _refusal(ATTN + unknown[0], f"{attn[unknown[0]]!r} is not handled: the field is unknown")
    attn = {name: value for name, value in attn.items() if value is not None}  # null is the default, where it is allowed
    for name, default, only in (("causal", False, True), ("rotary_emb_interleaved", False, False)):
        if _flag(attn, name, default, ATTN) != only:
            raise _refusal(ATTN + name, f"{not only} is not handled, only {only} is")
    if _count(attn, "mlp_dim", 0, ATTN, least=0):
        raise _refusal(ATTN + "mlp_dim", f"{attn['mlp_dim']!r} is not handled, only 0 (no MLP beside the attention) is")
    heads = _count(attn, "num_heads", prefix=ATTN)
    groups = _count(attn, "num_heads_kv", heads, ATTN)
    if heads % groups:
        raise _refusal(ATTN + "num_heads_kv", f"{groups} does not divide the number of heads, {heads}")
    if "head_dim" not in attn and hidden_size % heads:
        raise _refusal(ATTN + "num_heads", f"{heads} does not divide d_model, {hidden_size}, and head_dim is missing")
    width, turned = _count(attn, "head_dim", hidden_size // heads, ATTN), _count(attn, "rotary_emb_dim", 0, ATTN, least=0)
    if turned % 2 or turned > width:
        raise _refusal(ATTN + "rotary_emb_dim", f"must be even and at most head_dim = {width}, not {turned}")
    theta, conv = _positive(attn, "rotary_emb_base", 10000.0), _count(attn, "d_conv", 0, ATTN, least=0)
    qkv = ("q_proj", "k_proj", "v_proj") if _flag(attn, "qkv_proj_bias", True, ATTN) else ()
    out = ("o_proj",) if _flag(attn, "out_proj_bias", True, ATTN) else ()
    fields: dict[str, Any] = {
        "num_key_value_heads": groups,
        "scale": _positive(attn, "softmax_scale", width**-0.5),
        "rope": {"dim": turned, "theta": theta} if turned else None,
        "conv": conv,
        "bias": [*qkv, *out, *(["qkv_conv"] if conv else [])],
    }
    return [layer_spec(layer, heads, width, **fields) for layer in sorted(where)]


def _count(fields: dict[str, Any], name: str, default: int | None = None, prefix: str = "", least: int = 1) -> int:
    value = fields.get(name, default)
    if value is None and name not in fields:
        raise _refusal(prefix + name, "is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _refusal(prefix + name, f"must be a {'positive ' if least else ''}whole number, not {value!r}")
    return value


def _positive(attn: dict[str, Any], name: str, default: float) -> float:
    value = attn.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise _refusal(ATTN + name, f"must be a positive number, not {value!r}")
    return float(value)


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
