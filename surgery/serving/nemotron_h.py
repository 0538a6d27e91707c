"""NVIDIA's Nemotron-H, which transformers, vLLM and mlx-lm run; for Mamba-2 with layer grafts.

Every block of a Nemotron-H is a norm and one mixer, a Mamba-2 or attention without positions and biases, as ours are; only
names differ. Three things do not fit, and are written otherwise with the same result:

- the time step has a lower bound that must not be zero: it becomes 1e-30, below what softplus gives in training;
- the head is never tied to the embedding: it is written as a tensor of its own;
- kernels want heads of 64, 128 or 256 numbers, and Nemotron-H has one scale of the scores, 1 / sqrt(width): zeros widen every
  head (rows of q, k and v, columns of o), and q takes the quotient of the two scales.

Whatever else it cannot compute is refused. It keeps the residual in the model's own dtype whatever the configuration says, so
in 16 bits its rounding is not ours; what is verified is the same weights in float32.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.exporting.tokenizer import save_tokenizer
from surgery.modeling.graft import SILU

WIDTHS = (64, 128, 256)
POSITIONS = 32768  # there are none in the model; vLLM reserves memory for a context of this length unless told otherwise


def export_nemotron_h(hybrid: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the folder. Raises UserError for a hybrid that Nemotron-H cannot express, naming what it is."""
    if reason := why_not(hybrid.config):
        raise UserError(f"the hybrid cannot be exported as nemotron_h: {reason}")
    spec = hybrid.config.grafts[0]
    width = next(each for each in WIDTHS if each >= spec["head_dim"])  # of the heads, as the kernels take it
    state = {name.replace(".graft.", "."): _fitted(name, m, spec, width) for name, m in hybrid.state_dict().items()}
    if hybrid.config.tie_word_embeddings:
        state["lm_head.weight"] = state["backbone.embeddings.weight"].clone()  # or it would not be written
    save_torch_state_dict(state, folder)
    (folder / "config.json").write_text(json.dumps(fields(hybrid, width), indent=2) + "\n")
    save_tokenizer(tokenizer, folder)
    hybrid.generation_config.save_pretrained(folder)


def why_not(config: Any) -> str | None:
    """Why a hybrid of this configuration is no Nemotron-H; None if it is one."""
    reason = None
    if config.model_type != "mamba2_hybrid":
        return f"only hybrids of mamba2 are written so, and this is a {config.model_type}"
    if not config.grafts:
        reason = "without any attention layer it cannot generate from a cache"
    elif reasons := [why for spec in config.grafts if (why := _unlike(spec, config.grafts[0]))]:
        reason = reasons[0]
    elif (width := config.grafts[0]["head_dim"]) > WIDTHS[-1]:
        reason = f"attention heads are {width} wide, more than the {WIDTHS[-1]} that its kernels take"
    elif tuple(config.time_step_limit) != (0.0, math.inf):
        reason = f"the time step is bounded, time_step_limit = {tuple(config.time_step_limit)}, which decoding there ignores"
    elif config.hidden_act not in SILU:
        reason = f"the SSM's activation is {config.hidden_act}, and its kernels have silu only"
    return reason


def _unlike(spec: dict[str, Any], first: dict[str, Any]) -> str | None:
    """Why a graft is no attention of Nemotron-H, or not as the first one is."""
    where = f"in L{spec['layer']}"
    if spec["kind"] != "layer":
        return f"{where} heads are grafted; it knows whole layers of attention only (plan.kind=layer makes one)"
    for name, what in {
        "rope": "has positions (RoPE)",
        "conv": "has a convolution",
        "qk_norm": "normalises queries and keys",
        "bias": "has biases",
    }.items():
        if spec.get(name):
            return f"{where} the attention {what}, which nemotron_h cannot express"
    if spec | {"layer": 0} != first | {"layer": 0}:
        return f"{where} the attention has another shape than in L{first['layer']}, and all must be alike"
    return None


def fields(hybrid: PreTrainedModel, width: int) -> dict[str, Any]:
    """config.json for heads of `width`. Not by NemotronHConfig: SGLang wants the old names of the layers' types, vLLM both old
    and new ones of some fields, and llama.cpp takes any field of experts for a mixture of experts."""
    config, spec = hybrid.config, hybrid.config.grafts[0]
    grafted = {spec["layer"] for spec in config.grafts}
    attention = [layer in grafted for layer in range(config.num_hidden_layers)]
    dtype = str(hybrid.dtype).removeprefix("torch.")
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.num_heads * config.head_dim,  # of MLP blocks, of which there are none
        "num_hidden_layers": config.num_hidden_layers,
        "hybrid_override_pattern": "".join("*" if attends else "M" for attends in attention),
        "layers_block_type": ["attention" if attends else "mamba" for attends in attention],
        "num_attention_heads": spec["num_heads"],
        "num_key_value_heads": spec["num_key_value_heads"],
        "head_dim": width,
        "attention_bias": False,
        "max_position_embeddings": POSITIONS,
        "mamba_num_heads": config.num_heads,
        "mamba_head_dim": config.head_dim,
        "mamba_hidden_act": config.hidden_act,
        "mamba_ssm_cache_dtype": "float32",
        "ssm_state_size": config.state_size,
        "expand": config.expand,
        "n_groups": config.n_groups,
        "mamba_n_groups": config.n_groups,
        "conv_kernel": config.conv_kernel,
        "mamba_d_conv": config.conv_kernel,
        "use_conv_bias": config.use_conv_bias,
        "mamba_conv_bias": config.use_conv_bias,
        "chunk_size": config.chunk_size,
        "mamba_chunk_size": config.chunk_size,
        "use_bias": config.use_bias,
        "mamba_proj_bias": config.use_bias,  # as mlx-lm calls it
        "mlp_bias": False,
        "time_step_min": 1e-30,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "residual_in_fp32": config.residual_in_fp32,
        "rescale_prenorm_residual": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def _fitted(name: str, tensor: Tensor, spec: dict[str, Any], width: int) -> Tensor:
    """A tensor of the hybrid as Nemotron-H has it: a graft's with heads of `width`, any other as it is."""
    if ".graft." not in name:
        return tensor
    extra = width - spec["head_dim"]
    if ".o_proj." in name:  # hidden, heads * head_dim
        return pad(tensor.unflatten(1, (-1, spec["head_dim"])), (0, extra)).flatten(1)
    if ".q_proj." in name:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        exact = tensor.to(wide) * (spec["scale"] * width**0.5)
        if not torch.equal(exact, exact.to(tensor.dtype).to(wide)):
            raise UserError(
                f"the hybrid cannot be exported as nemotron_h: a scale of its attention has no exact place in the weights in "
                f"{tensor.dtype}; load the model in float32 and export that"
            )
        tensor = exact.to(tensor.dtype)
    return pad(tensor.unflatten(0, (-1, spec["head_dim"])), (0, 0, 0, extra)).flatten(0, 1)
