"""The original state-spaces folder, which the package mamba_ssm reads; for Mamba-1 and Mamba-2, with layer grafts or none.

It is what readers/mamba_ssm.py reads, written by the same table of names, so that surgery.load gives the hybrid back bit for
bit. What the configuration cannot say is found by reading it back: any field that differs then is refused by name.

The weights are a pickle because mamba_ssm reads nothing else. It holds tensors only, and is read as such.

What is equal is the forward over a whole text. mamba_ssm 2.3.2 generates from a cache as its forward says only with flash-attn,
and not where the attention has a convolution (mamba2attn): it keeps the outputs of that for the next token, not its inputs.
"""

import json
import math
import reprlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.exporting.fresh_process import OURS
from surgery.exporting.verify import Reader
from surgery.families.inert import entry_of
from surgery.hybrids.layer_graft import is_layer_graft
from surgery.hybrids.spliced import without_code
from surgery.hybrids.windows import is_window
from surgery.loading.streamed import Live
from surgery.records.plan import Plan
from surgery.runtime.ownership.complaints import reason
from surgery.serving.original_config import original_config
from surgery.serving.readers.mamba_ssm import original_names

USE = """\
from mamba_ssm import MambaLMHeadModel
from transformers import AutoTokenizer
model, tokenizer = MambaLMHeadModel.from_pretrained("NAME", device="cuda"), AutoTokenizer.from_pretrained("NAME")"""
READER = Reader(OURS, "this package", why="the kernels of mamba_ssm's own classes run on GPUs only")
LAYERS = {"mamba_hybrid": "Mamba1", "mamba2_hybrid": "Mamba2"}
# What reading back need not give: special tokens, which generation_config.json has, what only training or classes look at, and
# what follows from the grafts, which are compared by themselves.
FREE = frozenset(
    """
    model_type grafts auto_map bos_token_id eos_token_id pad_token_id dtype architectures transformers_version
    name_or_path _name_or_path return_dict output_hidden_states output_attentions initializer_range use_cache surgery
    rescale_prenorm_residual time_step_min time_step_max time_step_floor time_step_scale time_step_init_scheme use_mambapy
    use_associative_scan
    """.split()
)


def write(hybrid: PreTrainedModel, folder: Path, *, tokenizer: PreTrainedTokenizerBase, plan: Plan, base: str) -> None:
    """As Format.write says."""
    config = hybrid.config
    if why := why_not(config):
        raise UserError(f"the hybrid cannot be exported as mamba_ssm: {why}")
    held = Live(hybrid)
    state = {name: _whole([held[part] for part in parts]) for name, parts in original_names(hybrid).items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["backbone.embedding.weight"]
    try:
        torch.save(state, folder / "pytorch_model.bin")
    except RuntimeError as error:  # which is what torch makes of a disk that is full or read-only
        raise OSError(reason(error)) from error
    (folder / "config.json").write_text(json.dumps(fields(config), indent=2) + "\n")
    without_code(tokenizer).save_pretrained(folder)
    hybrid.generation_config.save_pretrained(folder)


def why_not(config: Any) -> str | None:
    """Why mamba_ssm cannot compute a hybrid of this configuration; None if it can."""
    if config.model_type not in LAYERS:
        what = "normalises B, C and dt" if config.model_type == "falcon_mamba_hybrid" else f"is a {config.model_type}"
        return f"only hybrids of mamba and mamba2 are written so, and this one {what}"
    if config.model_type == "mamba2_hybrid" and tuple(config.time_step_limit) != (0.0, math.inf):
        return f"the time step is bounded, time_step_limit = {tuple(config.time_step_limit)}, which decoding there ignores"
    for spec in config.grafts:
        where, first = f"in L{spec['layer']}", config.grafts[0]
        if is_window(spec):
            return f"{where} heads have a window; there all keys are kept"
        if not is_layer_graft(spec):
            return f"{where} heads are grafted; it knows whole layers of attention only"
        if spec | {"layer": 0} != first | {"layer": 0}:
            return f"{where} the attention has another shape than in L{first['layer']}, and all must be alike"
    return _lost(config, original_config(fields(config)))


def _lost(config: Any, again: Any) -> str | None:
    """What was lost in the configuration that was read back, or None."""
    for spec in config.grafts:
        (other,) = (other for other in again.grafts if other["layer"] == spec["layer"])
        for name, value in spec.items():
            if other[name] != value:
                return f"in L{spec['layer']} the attention's {name} has no place in its configuration: {reprlib.repr(value)}"
    written = again.to_dict()
    for name, value in config.to_dict().items():
        if name not in FREE and entry_of(name, config) is None and written.get(name) != value:
            return f"{name} has no place in its configuration: {value!r}"
    return None


def fields(config: Any) -> dict[str, Any]:
    """config.json: the arguments of mamba_ssm's classes. The reader's defaults are not relied on, but mamba_ssm's norms have
    an epsilon of 1e-5 and its activation is silu."""
    layer = LAYERS[config.model_type]
    ssm: dict[str, Any] = {
        "layer": layer,
        "d_state": config.state_size,
        "d_conv": config.conv_kernel,
        "expand": config.expand,
        "bias": config.use_bias,
        "conv_bias": config.use_conv_bias,
    }
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
        "attn_layer_idx": [spec["layer"] for spec in config.grafts],
        "attn_cfg": _attention(config.grafts[0]) if config.grafts else {},
        "rms_norm": True,
        "residual_in_fp32": config.residual_in_fp32,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,  # the size is that of the tensors
        "tie_embeddings": config.tie_word_embeddings,
    }


def _attention(spec: dict[str, Any]) -> dict[str, Any]:
    """The arguments of mamba_ssm's MHA, whose own defaults are not causal and biased."""
    rope = spec["rope"] or {"dim": 0}
    arguments = {
        "num_heads": spec["num_heads"],
        "num_heads_kv": spec["num_key_value_heads"],
        "head_dim": spec["head_dim"],
        "causal": True,
        "qkv_proj_bias": "q_proj" in spec["bias"],
        "out_proj_bias": "o_proj" in spec["bias"],
        "d_conv": spec["conv"],
        "rotary_emb_dim": rope.get("dim", 0),
    }
    if rope.get("theta", 10000.0) != 10000.0:
        arguments["rotary_emb_base"] = rope["theta"]
    if spec["scale"] != spec["head_dim"] ** -0.5:
        arguments["softmax_scale"] = spec["scale"]
    return arguments


def _whole(parts: list[Tensor]) -> Tensor:
    """The parts, one below the other. torch.save writes all the memory that a tensor is a view of, such as a whole file's map:
    one part is given as a view of its own bytes alone, and not copied."""
    if len(parts) > 1:
        return torch.cat(parts)
    (tensor,) = parts
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    own = torch.from_numpy(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return own.view(tensor.dtype).reshape(tensor.shape)
