"""How layer grafts start: from a layer of a donor, or at random.

A donor's attention is taken over exactly or not at all. What is read here is what LayerGraft computes; any other kind of
attention is refused, by model type, because a field that nobody thought of would change it without a word.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from surgery.errors import UserError
from surgery.modeling.layer_graft import LayerGraft
from surgery.records.plan import Plan

DONORS = ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
WHY_NOT = {
    "attn_logit_softcapping": "its attention scores are soft-capped",
    "kv_lora_rank": "its keys and values are compressed (multi-head latent attention)",
}
CHANGING = ("dynamic", "longrope")  # RoPE whose frequencies depend on the length of the text
WIDEST = 64  # of a head that starts at random


class LayerStart(NamedTuple):
    """The entry of `grafts` for a layer, and the graft's tensors by name: the donor's own or views of them; none where it
    starts at random."""

    entry: dict[str, Any]
    tensors: dict[str, Tensor]


def layer_starts(hidden_size: int, plan: Plan, donor: Any = None) -> dict[int, LayerStart]:
    """What the layer grafts of a plan are and start from, by layer. donor: an open model in the place of plan.donor.

    Without a donor attention has no positions: the SSMs around it know them, as in Jamba and Nemotron-H. Raises UserError for a
    donor that cannot be taken over exactly.
    """
    if donor is None and plan.donor is not None:
        from surgery.models.load import load  # which imports splice.py

        donor = load(plan.donor, dtype="stored", device="cpu").model
    if donor is not None:
        layers = {site.layer: plan.donor_layers.get(str(site), site.layer) for site in plan.sites}
        return {layer: take_layer(donor, number, hidden_size, layer) for layer, number in layers.items()}
    width = plan.width or max(width for width in range(1, WIDEST + 1) if hidden_size % width == 0)
    if hidden_size % width:
        raise UserError(f"width: heads of {width} do not divide the hidden size of the model, {hidden_size}")
    entry = describe_layer(hidden_size // width, hidden_size // width, width)
    return {site.layer: LayerStart({**entry, "layer": site.layer}, {}) for site in plan.sites}


def describe_layer(heads: int, groups: int, width: int, **more: Any) -> dict[str, Any]:
    """An entry of `grafts` (modeling/layer_graft.py) without its layer: plain attention, unless `more` says otherwise."""
    plain = {"scale": width**-0.5, "rope": None, "qk_norm": None, "conv": 0, "bias": [], "of_base": False}
    return {"kind": "layer", "num_heads": heads, "num_key_value_heads": groups, "head_dim": width, **plain, **more}


@torch.no_grad()
def fill_layer(graft: LayerGraft, start: LayerStart, seed: int) -> None:
    """Give a layer graft its first weights. At random: such that every projection keeps the size of what it is given."""
    if start.tensors:
        for name, parameter in graft.named_parameters():
            parameter.copy_(start.tensors[name])
        return
    random = torch.Generator().manual_seed(seed * 1009 + start.entry["layer"])
    for module in (graft.q_proj, graft.k_proj, graft.v_proj, graft.o_proj):
        module.weight.copy_(torch.randn(module.weight.shape, generator=random) * module.in_features**-0.5)


def take_layer(donor: Any, number: int, hidden_size: int, layer: int) -> LayerStart:
    """The attention of a donor's layer, for a layer of the base. Raises UserError if the donor has another hidden size, no such
    layer, or a kind of attention that a layer graft does not compute."""
    config = donor.config
    if config.model_type not in DONORS:
        why = "".join(f", because {text}" for field, text in WHY_NOT.items() if getattr(config, field, None))
        raise UserError(f"a {config.model_type} model cannot be a donor{why}; donors are {', '.join(DONORS)}")
    if config.hidden_size != hidden_size:
        raise UserError(f"the donor's hidden size is {config.hidden_size}, the base's {hidden_size}; they must be equal")
    if number >= len(donor.base_model.layers):
        raise UserError(f"the donor has no layer {number}: it has layers 0 to {len(donor.base_model.layers) - 1}")
    attention = donor.base_model.layers[number].self_attn
    window = attention.sliding_window if hasattr(attention, "sliding_window") else getattr(config, "sliding_window", None)
    if window is not None:
        raise UserError(f"layer {number} of the donor attends to the last {window} tokens only, and a graft to all")
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, attention.head_dim
    parts = split_projections(attention, heads * width, groups * width)
    norms = {name: norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name, None)) is not None}
    tensors = {f"{name}.{kind}": tensor for name, both in parts.items() for kind, tensor in both.items()}
    tensors |= {f"{name}.weight": norm.weight for name, norm in norms.items()}
    if strange := [name for name, tensor in tensors.items() if not tensor.is_floating_point()]:
        raise UserError(f"the donor's {strange[0]} is quantised; load the donor in floating point")
    entry = describe_layer(
        heads,
        groups,
        width,
        layer=layer,
        scale=attention.scaling,
        rope=read_rope(donor, attention),
        qk_norm=norms["q_norm"].variance_epsilon if norms else None,
        bias=sorted(name for name, both in parts.items() if "bias" in both),
    )
    return LayerStart(entry, tensors)


def split_projections(attention: Any, inner: int, shared: int) -> dict[str, dict[str, Tensor]]:
    """Weight and bias, if there is one, of q_proj, k_proj, v_proj and o_proj, also where the first three are one."""

    def both(module: nn.Linear) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in (("weight", module.weight), ("bias", module.bias)) if tensor is not None}

    parts = {"o_proj": both(attention.o_proj)}
    if not hasattr(attention, "qkv_proj"):
        return parts | {name: both(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj")}
    rows = {kind: tensor.split([inner, shared, shared]) for kind, tensor in both(attention.qkv_proj).items()}
    names = enumerate(("q_proj", "k_proj", "v_proj"))
    return parts | {name: {kind: three[i] for kind, three in rows.items()} for i, name in names}


def read_rope(donor: Any, attention: Any) -> dict[str, Any] | None:
    """The entry `rope` of a layer graft. Raises UserError for positions that change with the length of the text."""
    if not getattr(attention, "use_rope", True):
        return None
    rotary = donor.base_model.rotary_emb
    if rotary.rope_type in CHANGING:
        raise UserError(f"the donor's RoPE ('{rotary.rope_type}') changes with the length of the text, which a graft's cannot")
    with torch.device("cpu"):
        fresh = type(rotary)(donor.config)  # made anew: a donor in bfloat16 may have rounded its own
    if rotary.rope_type == "default":
        return {"dim": 2 * len(fresh.inv_freq), "theta": float(donor.config.rope_parameters["rope_theta"])}
    return {"inv_freq": fresh.inv_freq.tolist(), "scaling": float(fresh.attention_scaling)}
