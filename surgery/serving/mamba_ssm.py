"""The original state-spaces folder, which the package mamba_ssm reads; for Mamba-1 and Mamba-2, with layer grafts or none.

It is what models/original.py reads, so that surgery.load gives the same model back. What its configuration cannot say is found
by reading it back: any field that differs then is refused by name. The weights are a pickle because mamba_ssm reads nothing
else; it holds tensors only, and is read as such.

What is equal is the forward over a whole text. mamba_ssm 2.3.2 generates from a cache as its forward says only with flash-attn,
and not where the attention has a convolution: it keeps the outputs of that for the next token, not its inputs.
"""

import json
import math
import re
import reprlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.exporting.tokenizer import save_tokenizer
from surgery.models import original

LAYERS = {"mamba_hybrid": "Mamba1", "mamba2_hybrid": "Mamba2"}
# What reading back need not give: what training or classes alone look at, and what generation_config.json has.
FREE = set(
    """
    model_type grafts auto_map bos_token_id eos_token_id pad_token_id dtype architectures transformers_version _name_or_path
    return_dict output_hidden_states output_attentions initializer_range use_cache rescale_prenorm_residual time_step_min
    time_step_max time_step_floor time_step_scale time_step_init_scheme use_mambapy use_associative_scan
    """.split()
)


def export_mamba_ssm(hybrid: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the folder. Raises UserError for a model that mamba_ssm cannot compute, naming what it is."""
    if reason := why_not(hybrid.config):
        raise UserError(f"the model cannot be exported as mamba_ssm: {reason}")
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in hybrid.state_dict().items():
        place = re.sub(r"\.graft\.(\w+)\.", lambda match: f".{original.MHA[match[1]]}.", name)
        parts.setdefault(original.EMBEDDING if name == "backbone.embeddings.weight" else place, []).append(tensor)
    state = {name: torch.cat(each).cpu() for name, each in parts.items()}  # copies, of which nothing else is a part
    if hybrid.config.tie_word_embeddings:
        state[original.HEAD] = state[original.EMBEDDING]
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(fields(hybrid.config), indent=2) + "\n")
    save_tokenizer(tokenizer, folder)
    hybrid.generation_config.save_pretrained(folder)


def why_not(config: Any) -> str | None:
    """Why mamba_ssm cannot compute a model of this configuration; None if it can."""
    if config.model_type not in LAYERS:
        return f"only mamba and mamba2 are written so, and this is a {config.model_type}"
    if config.model_type == "mamba2_hybrid" and tuple(config.time_step_limit) != (0.0, math.inf):
        return f"the time step is bounded, time_step_limit = {tuple(config.time_step_limit)}, which decoding there ignores"
    for spec in config.grafts:
        if spec["kind"] != "layer":
            return f"in L{spec['layer']} heads are grafted; it knows whole layers of attention only"
        if _shape(spec) != _shape(config.grafts[0]):
            return f"the attention in L{spec['layer']} has another shape than in L{config.grafts[0]['layer']}"
    return _lost(config, original.read_config(fields(config)))


def _shape(spec: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in spec.items() if name not in ("layer", "of_base")}


def _lost(config: Any, again: Any) -> str | None:
    """What was lost in the configuration that was read back, or None."""
    for spec, other in zip(sorted(config.grafts, key=lambda spec: spec["layer"]), getattr(again, "grafts", []), strict=True):
        for name, value in _shape(spec).items():
            if other.get(name) != value and (other.get(name) or value):
                return f"in L{spec['layer']} the attention's {name} has no place in its configuration: {reprlib.repr(value)}"
    written = again.to_dict()
    for name, value in config.to_dict().items():
        if name not in FREE and name in written and written[name] != value:
            return f"{name} has no place in its configuration: {value!r}"
    return None


def fields(config: Any) -> dict[str, Any]:
    """config.json: the arguments of mamba_ssm's classes, whose norms have an epsilon of 1e-5 and whose activation is silu."""
    layer = LAYERS[config.model_type]
    ssm = {"layer": layer, "d_state": config.state_size, "d_conv": config.conv_kernel, "expand": config.expand}
    ssm |= {"bias": config.use_bias, "conv_bias": config.use_conv_bias}
    if layer == "Mamba1":
        ssm["dt_rank"] = config.time_step_rank
    else:
        ssm |= {"headdim": config.head_dim, "ngroups": config.n_groups, "chunk_size": config.chunk_size}
    return {
        "d_model": config.hidden_size,
        "d_intermediate": 0,
        "n_layer": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "ssm_cfg": ssm,
        "attn_layer_idx": sorted(spec["layer"] for spec in config.grafts),
        "attn_cfg": _attention(config.grafts[0]) if config.grafts else {},
        "rms_norm": True,
        "residual_in_fp32": config.residual_in_fp32,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,  # the size is that of the tensors
        "tie_embeddings": config.tie_word_embeddings,
    }


def _attention(spec: dict[str, Any]) -> dict[str, Any]:
    """The arguments of mamba_ssm's MHA, whose own defaults are not causal and biased."""
    rope, bias = spec.get("rope") or {"dim": 0}, spec.get("bias") or ()
    arguments = {
        "num_heads": spec["num_heads"],
        "num_heads_kv": spec["num_key_value_heads"],
        "head_dim": spec["head_dim"],
        "causal": True,
        "qkv_proj_bias": "q_proj" in bias,
        "out_proj_bias": "o_proj" in bias,
        "d_conv": spec.get("conv") or 0,
        "rotary_emb_dim": rope.get("dim", 0),
    }
    if rope.get("theta", 10000.0) != 10000.0:
        arguments["rotary_emb_base"] = rope["theta"]
    if spec["scale"] != spec["head_dim"] ** -0.5:
        arguments["softmax_scale"] = spec["scale"]
    return arguments
