"""A small model of any architecture: its configuration with fewer layers and smaller widths, and random weights.

What a published configuration chooses (biases, norms, activations, tied weights, kinds of layers, rotary embeddings) stays;
what only makes it large does not. Of the layers, the first of each kind is kept, and one more. So a model of any size is
checked from its config.json, without its weights.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from surgery.errors import UserError, did_you_mean

HIDDEN, HEADS, WIDTH, STATE, EXPERTS = 64, 4, 16, 16, 4
SMALL, WORDS = 5_000_000, 1000  # parameters of a model that is checked whole; words of one that is not
UNCUT = ("bamba_hybrid", "falcon_h1_hybrid", "jamba_hybrid")  # whose kinds of layers follow from other fields
MOST = 1024  # of a hidden size that could not be made small

# By the field's name, what it becomes where it is larger.
SIZES = {
    **dict.fromkeys(("vocab_size", "ngram_vocab_size_base"), 97),
    **dict.fromkeys(("hidden_size", "embedding_dim", "lru_width", "router_hidden_size", "ple_embed_dim"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "attention_hidden_size"), 2 * HIDDEN),
    **dict.fromkeys(("num_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), HEADS // 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "v_head_dim", "qk_nope_head_dim"), WIDTH),
    **dict.fromkeys(("qk_rope_head_dim", "index_n_heads", "indexer_n_heads", "adapter_rank", "d_rel"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "index_head_dim", "indexer_head_dim", "hc_lowrank"), WIDTH),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads", "num_heads"), HEADS),
    **dict.fromkeys(("linear_num_key_heads",), HEADS // 2),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), WIDTH),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 2 * HIDDEN // WIDTH),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), WIDTH),
    **dict.fromkeys(("mamba_d_ssm",), 2 * HIDDEN),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), STATE),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), HIDDEN // 16),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups", "n_group", "num_expert_group"), 2),
    **dict.fromkeys(("topk_group", "num_mem_blocks", "split_ngram_parts", "make_ngram_vocab_size_divisible_by"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "heads_per_ngram", "hc_mult", "hc_count"), 2),
    **dict.fromkeys(("moe_intermediate_size", "moe_latent_size", "shared_expert_intermediate_size"), HIDDEN // 2),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), HIDDEN // 2),
    **dict.fromkeys(
        ("chunk_size", "mamba_chunk_size", "block_size", "index_topk", "indexer_budget", "indexer_compress_ratio"), 16
    ),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "rel_extent"), 32),
    **dict.fromkeys(("max_position_embeddings", "context_length", "model_max_length"), 128),
    **dict.fromkeys(("num_dense_layers", "first_k_dense_replace", "num_nextn_predict_layers"), 1),
    "unpadded_vocab_size": 97,
    "block_multiple_of": 8,
    "index_kpool": 4,
    "ffn_round_up_to_multiple_of": 8,
}
HEADS_OF = {"mamba_n_heads": "mamba_d_head", "num_heads": "head_dim", "n_mamba_heads": "mamba_headdim"}  # and their width
DEPTHS = ("num_hidden_layers", "num_blocks")
LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")  # one entry a layer
EXTRA_LAYERS = 1  # beyond one of each kind: a second recurrent layer sees the state of a first
# Follows from other fields, or names layers by number; it is made again.
DERIVED = (
    "qk_head_dim",
    "hybrid_layer_ids",
    "kv_channels",
    "num_query_groups",
    "full_attn_idxs",
    "attention_head_dim",
    "local_layer_ids",
    "_name_or_path",
)
CODE = ("auto_map", "_name_or_path")  # what finds the model's own code
MARKS = ("transformers_version", "architectures", "auto_map", "quantization_config", "dtype", "torch_dtype", "grafts")

# What follows from other sizes in a way of its own.
TYPES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 2 * HIDDEN, "mamba_d_head": WIDTH, "mamba_n_heads": 2 * HIDDEN // WIDTH},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "rwkv": {"attention_hidden_size": HIDDEN},
    "xlstm": {"hidden_size": 2 * HIDDEN, "embedding_dim": 2 * HIDDEN, "num_heads": 2},  # of others 5.23 cannot make the cache
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },  # blocks that share their weights
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}
MIXED = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
# What the default configuration of a type leaves out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": MIXED | {"position_embedding_type": "rope"},
    "minimax": MIXED,
    "lfm2": CONV,
    "lfm2_moe": CONV,
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
}


def read_config(source: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a model type, a config.json, a folder or a Hub id. Raises UserError where there is none."""
    path = Path(source)
    try:
        if path.suffix == ".json" and path.is_file():
            fields = json.loads(path.read_text(encoding="utf-8"))
            if "auto_map" in fields and not trust_remote_code and fields.get("model_type") not in _known_types():
                raise UserError(f"{path} needs the code of its own folder; --trust-remote-code runs it")
            place = path.parent if trust_remote_code and path.name == "config.json" else path
            return AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
        if not path.exists() and str(source) in _known_types():
            return AutoConfig.for_model(str(source), **DEFAULTS.get(str(source), {}))
        if not path.exists() and (path.suffix == ".json" or (path.parent != Path() and path.parent.is_dir())):
            raise UserError(f"there is no file or folder {source}")
        if not path.exists() and path.parent == Path():
            raise UserError(f"there is no model type '{source}'{did_you_mean(str(source), _known_types())}")
        return AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    except UserError:
        raise
    except Exception as error:
        line = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"no configuration of {source}: {line}") from error


def _known_types() -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same architecture with a few small layers. Raises UserError where no small configuration can be made."""
    config = config.get_text_config(decoder=True)
    fields = {name: value for name, value in config.to_dict().items() if name not in DERIVED + MARKS}
    if fields.get("hidden_size", HIDDEN + 1) <= HIDDEN and "embedding_dim" not in fields:
        return _as_config(config, fields | _fewer_layers(fields))
    small = {n: min(v, SIZES[n]) if n in SIZES and type(v) is int else v for n, v in fields.items()}
    if small.get("num_key_value_heads") and fields["num_key_value_heads"] == fields.get("num_attention_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]
    if fields.get("linear_num_key_heads") and fields["linear_num_key_heads"] == fields["linear_num_value_heads"]:
        small["linear_num_key_heads"] = small["linear_num_value_heads"]
    expand = fields.get("expand", fields.get("mamba_expand"))
    if isinstance(expand, int) and fields.get("mamba_d_ssm") is None and config.model_type != "xlstm":
        for heads, width in HEADS_OF.items():
            if heads in small:
                small[heads] = expand * HIDDEN // (small[width] if isinstance(small.get(width), int) else WIDTH)
    return _as_config(
        config, small | _fewer_layers(fields) | {n: v for n, v in TYPES.get(config.model_type, {}).items() if n in fields}
    )


def _as_config(config: PreTrainedConfig, fields: dict[str, Any]) -> PreTrainedConfig:
    fields |= dict.fromkeys(("bos_token_id", "eos_token_id")) | {"pad_token_id": 0}
    fields |= {name: getattr(config, name) for name in CODE if getattr(config, "auto_map", None)}
    try:
        small = type(config)(**fields)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot make a small configuration of '{config.model_type}': {reason}") from error
    if max(getattr(small, "hidden_size", 0), fields.get("d_model", 0)) > MOST:
        raise UserError(
            f"cannot make a small configuration of '{config.model_type}': its sizes have names that are not known here"
        )
    return small


def _fewer_layers(fields: dict[str, Any]) -> dict[str, Any]:
    """Number of layers and lists of one entry a layer."""
    depth = next((fields[name] for name in DEPTHS if fields.get(name)), None)
    lists = {name: fields[name] for name in LISTS if isinstance(fields.get(name), list)}
    if not lists:
        return dict.fromkeys((name for name in DEPTHS if name in fields), 4 if "attn_layer_period" in fields else 3)
    rows = list(zip(*lists.values(), strict=False))
    kept = sorted({rows.index(row) for row in rows})
    kept += [place for place in range(len(rows)) if place not in kept][:EXTRA_LAYERS]
    kept.sort()
    small = {name: [each[place] for place in kept] for name, each in lists.items()}
    return small | {name: len(kept) for name in DEPTHS if name in fields and depth is not None}


@torch.no_grad()
def first_of_each_kind(model: Any) -> Any:
    """A hybrid with its own weights, but with only the first layer of each kind, two at least, the first WORDS words, and short
    chunks of the scan. So its code, settings and grafts are checked in a time that does not grow with its depth. A small model,
    and one whose configuration cannot be cut so, is returned as it is."""
    config, grafts = model.config, {entry["layer"]: entry for entry in getattr(model.config, "grafts", None) or ()}
    if sum(p.numel() for p in model.parameters()) <= SMALL or config.model_type in UNCUT:
        return model
    depth = config.num_hidden_layers
    lists = {name: getattr(config, name) for name in LISTS if isinstance(getattr(config, name, None), list)}
    kinds = [(grafts.get(layer, {}).get("kind"), *(each[layer] for each in lists.values())) for layer in range(depth)]
    kept = sorted(set(map(kinds.index, kinds)))
    kept = kept if len(kept) > 1 else list(range(min(2, depth)))
    fields = config.to_dict() | {"num_hidden_layers": len(kept), "vocab_size": min(WORDS, config.vocab_size)}
    fields |= {name: [each[layer] for layer in kept] for name, each in lists.items()}
    fields |= {name: min(SIZES[name], fields[name]) for name in ("chunk_size", "mamba_chunk_size") if fields.get(name)}
    fields["grafts"] = [grafts[layer] | {"layer": place} for place, layer in enumerate(kept) if layer in grafts]
    with torch.random.fork_rng(devices=[]), no_init_weights():
        few = type(model)(type(config)(**fields)).to(model.dtype).eval()
    whole = model.state_dict()
    places = {str(place): str(layer) for place, layer in enumerate(kept)}
    for name, tensor in few.state_dict().items():
        source = whole[re.sub(r"(?<=layers\.)\d+", lambda found: places[found[0]], name, count=1)]
        tensor.copy_(source[: len(tensor)] if tensor.dim() else source)
    return few


def make_model(config: PreTrainedConfig, trust_remote_code: bool, **options: Any) -> Any:
    """A model as transformers initialises it. Raises UserError where there is no such class."""
    try:
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
    except Exception as error:
        raise UserError(f"transformers cannot make a model of '{config.model_type}': {str(error).splitlines()[0]}") from error


def random_model(config: PreTrainedConfig, *, seed: int = 0, trust_remote_code: bool = False) -> PreTrainedModel:
    """A model with random weights, large enough for every part to count. Raises UserError where there is no such class."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(config, trust_remote_code)
        enliven(model)
    return model.eval()


@torch.no_grad()
def enliven(model: nn.Module) -> None:
    """As initialised, mixers do next to nothing, biases and some scales are zero and norms one: a fault in them, or in what
    they multiply, would not be seen."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            spread = parameter.std().item() if parameter.numel() > 1 else 0.0
            if parameter.dim() > 1 and spread > 0 and not name.startswith("A_"):
                parameter.mul_(max(1.0, min(parameter.shape[-1], 4 * HIDDEN) ** -0.5 / spread))
            elif not parameter.any():
                parameter.normal_(std=0.1)
            elif name in ("weight", "scale") and spread == 0:
                parameter.mul_(torch.empty_like(parameter).uniform_(0.7, 1.4))
