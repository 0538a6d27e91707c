"""How layer grafts start: from a donor, of which they take a decoder layer, or at random.

A donor's attention is taken over exactly or not at all. What is read here is what LayerGraft computes; any other kind of
attention or of block is refused, by model type, because a field that nobody thought of would change it in silence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.families.dual_start import generator
from surgery.hybrids.layer_graft import LayerGraft, layer_spec
from surgery.records.plan import Plan

# Blocks of these are norm, attention, residual, norm, gated MLP, residual, with nothing else in them.
DONORS = ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
WHY_NOT = {
    "attn_logit_softcapping": "its attention scores are soft-capped",
    "kv_lora_rank": "its keys and values are compressed (multi-head latent attention)",
}
CHANGING = ("dynamic", "longrope")  # RoPE whose frequencies depend on the length of the text


@dataclass(frozen=True)
class DonorLayer:
    """A decoder layer: the entry of `grafts` without the number of the base's layer, and the graft's tensors by name, which
    are the donor's own, or views of them."""

    spec: dict[str, Any]
    tensors: dict[str, Tensor]


def check_donor(plan: Plan, donor: PreTrainedModel | None) -> None:
    """Raise UserError if the plan asks for a donor that is not given, or does not ask for one that is."""
    if plan.init == "donor" and donor is None:
        raise UserError(f"the plan's grafts start from a donor{f' ({plan.donor})' if plan.donor else ''}, and none is given")
    if plan.init != "donor" and donor is not None:
        raise UserError(f"a donor is given, but the plan's grafts start {plan.init}")


def layer_start(base: PreTrainedModel, plan: Plan, donor: PreTrainedModel | None, layer: int) -> DonorLayer:
    """What the layer graft of a layer is and starts from; without a donor no tensors, and plain attention as wide as the base.

    Without a donor it has no positions: the SSMs around it know them, as in Jamba and NemotronH, which so can hold it.
    """
    hidden = base.config.hidden_size
    if donor is None:
        width = plan.width or max(width for width in range(1, 65) if hidden % width == 0)
        if hidden % width:
            raise UserError(f"heads of width {width} do not divide the base's hidden size, {hidden}")
        return DonorLayer(layer_spec(layer, hidden // width, width), {})
    taken = donor_layer(donor, plan.donor_layer(layer), hidden, mlp=plan.mlp)
    return DonorLayer(taken.spec | {"layer": layer}, taken.tensors)


@torch.no_grad()
def fill_layer(graft: LayerGraft, start: DonorLayer, plan: Plan) -> None:
    """Give a layer graft its first weights. At random: such that every projection keeps the size of what it is given."""
    if start.tensors:
        parameters = dict(graft.named_parameters())
        assert parameters.keys() == start.tensors.keys()  # spec and tensors are of the same donor
        for name, parameter in parameters.items():
            parameter.copy_(start.tensors[name])
        return
    random = generator(plan, graft.layer_idx)
    for module in (graft.q_proj, graft.k_proj, graft.v_proj, graft.o_proj):
        values = torch.randn(module.weight.shape, generator=random) * module.in_features**-0.5
        module.weight.copy_(values)


def donor_layer(donor: PreTrainedModel, index: int, hidden_size: int, *, mlp: bool = True) -> DonorLayer:
    """A layer of a donor, with or without its MLP and norms.

    hidden_size: the base's. Raises UserError if the donor has another, no such layer, or a kind of attention that a layer graft
    cannot compute.
    """
    layer = _layer(donor, index, hidden_size)
    attention, config = layer.self_attn, donor.config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    parts = _projections(attention, heads * attention.head_dim, groups * attention.head_dim) | {"o_proj": attention.o_proj}
    norms = {name: norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name, None)) is not None}
    gated = None
    if mlp:
        parts |= {f"mlp.{name}": part for name, part in _mlp(layer.mlp).items()}
        norms |= {name: getattr(layer, name) for name in ("input_layernorm", "post_attention_layernorm")}
        gated = {
            "intermediate_size": len(parts["mlp.gate_proj"].weight),
            "hidden_act": config.hidden_act,
            "norm_eps": layer.input_layernorm.variance_epsilon,
        }
    tensors = {f"{name}.weight": part.weight for name, part in (parts | norms).items()}
    tensors |= {f"{name}.bias": part.bias for name, part in parts.items() if part.bias is not None}
    if strange := [name for name, tensor in tensors.items() if not tensor.is_floating_point()]:
        raise UserError(f"the donor's {strange[0]} is quantised; load the donor in floating point")
    spec = layer_spec(
        index,
        heads,
        attention.head_dim,
        num_key_value_heads=groups,
        scale=attention.scaling,
        rope=_rope(donor, attention),
        qk_norm=norms["q_norm"].variance_epsilon if "q_norm" in norms else None,
        mlp=gated,
        bias=[name.removeprefix("mlp.") for name, part in parts.items() if part.bias is not None],
    )
    return DonorLayer(spec, tensors)


def _layer(donor: PreTrainedModel, index: int, hidden_size: int) -> Any:
    config = donor.config
    if config.model_type not in DONORS:
        why = [text for field, text in WHY_NOT.items() if getattr(config, field, None)]
        because = f", because {why[0]}" if why else ""
        raise UserError(f"a {config.model_type} model cannot be a donor{because}; donors are {', '.join(DONORS)}")
    if config.hidden_size != hidden_size:
        raise UserError(f"the donor's hidden size is {config.hidden_size}, the base's {hidden_size}; they must be equal")
    layers: Any = donor.base_model.layers
    if index >= len(layers):
        raise UserError(f"the donor has no layer {index}: it has layers 0-{len(layers) - 1}")
    attention = layers[index].self_attn
    window = attention.sliding_window if hasattr(attention, "sliding_window") else getattr(config, "sliding_window", None)
    if window is not None:
        raise UserError(f"layer {index} of the donor attends to the last {window} tokens only (sliding window), a graft to all")
    return layers[index]


def _projections(attention: Any, inner: int, shared: int) -> dict[str, Any]:
    """q_proj, k_proj and v_proj, also where they are one."""
    if hasattr(attention, "qkv_proj"):
        return _parts(attention.qkv_proj, {"q_proj": inner, "k_proj": shared, "v_proj": shared})
    return {name: getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")}


def _mlp(mlp: Any) -> dict[str, Any]:
    """gate_proj, up_proj and down_proj, also where two are one."""
    if hasattr(mlp, "gate_up_proj"):
        inner = mlp.gate_up_proj.out_features // 2
        return _parts(mlp.gate_up_proj, {"gate_proj": inner, "up_proj": inner}) | {"down_proj": mlp.down_proj}
    return {name: getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")}


@dataclass(frozen=True)
class _Part:
    """Some rows of a projection."""

    weight: Tensor
    bias: Tensor | None


def _parts(whole: nn.Linear, sizes: dict[str, int]) -> dict[str, _Part]:
    weights = whole.weight.split(list(sizes.values()))
    biases = [None] * len(sizes) if whole.bias is None else whole.bias.split(list(sizes.values()))
    return {name: _Part(*part) for name, part in zip(sizes, zip(weights, biases, strict=True), strict=True)}


def _rope(donor: PreTrainedModel, attention: Any) -> dict[str, Any] | None:
    """As in layer_spec: one theta where that says it all, else the frequencies themselves."""
    if not getattr(attention, "use_rope", True):
        return None
    rotary: Any = donor.base_model.rotary_emb
    if rotary.rope_type in CHANGING:
        raise UserError(f"the donor's RoPE ('{rotary.rope_type}') changes with the length of the text, which a graft's cannot")
    with torch.device("cpu"):
        fresh = type(rotary)(donor.config)  # anew: a donor in bfloat16 may have rounded its own
    if rotary.rope_type == "default":
        return {"dim": 2 * len(fresh.inv_freq), "theta": float(donor.config.rope_parameters["rope_theta"])}
    return {"inv_freq": fresh.inv_freq.tolist(), "scaling": float(fresh.attention_scaling)}
