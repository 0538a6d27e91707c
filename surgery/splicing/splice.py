"""adopt, splice and unsplice: the base's modules in containers of another class.

Base and hybrid have containers of their own (the model, its blocks, its mixers) and share leaf modules and parameters. So a
hybrid costs the memory of its grafts; what is hung on its modules, a LoRA, leaves the base alone; quantised and offloaded
modules come as they are; and `unsplice` gives the base back bit for bit, unless somebody wrote into the shared weights (merging
a LoRA does), which it then says.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.errors import UserError
from surgery.modeling import FAMILIES, family_of
from surgery.modeling.graft import ABSENT, NATS, ChannelGraft, is_plain
from surgery.modeling.layer_graft import LayerGraftMixer
from surgery.records.plan import Plan, Start
from surgery.records.site import Site
from surgery.runtime.progress import say
from surgery.splicing.donor import LayerStart, fill_layer, layer_starts

OWN = ("model_type", "architectures", "grafts", "auto_map")  # fields whose values differ between base and hybrid
CHOSEN = ("_attn_implementation_internal", "_experts_implementation_internal", "_name_or_path")
# Attributes of a quantised or offloaded model by which transformers and accelerate know how to save and move it.
NOTES = ("hf_quantizer", "is_quantized", "quantization_method", "is_loaded_in_8bit", "is_loaded_in_4bit", "hf_device_map")
SAMPLE = 1024  # numbers of each tensor, by which it is known again
NARROWEST = 32  # the least width of queries and keys, unless the plan says


@contextmanager
def measuring(models: Iterable[Any]) -> Iterator[None]:
    """Put these models in eval mode, and afterwards their modules and parameters back as they were."""
    models = list(models)
    modes = [(module, module.training) for model in models for module in model.modules()]
    learning = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter in learning:  # splicing ends that
            parameter.requires_grad_(True)


def adopt(model: Any) -> Any:
    """The base in its hybrid's class with no graft, which computes what the base computes. A hybrid, and a model of no family,
    is returned as it is."""
    family = family_of(model.config)
    if family is None or isinstance(model, family.hybrid):
        return model
    return contain(model, family.hybrid, convert(model.config, family.hybrid.config_class, []))


def splice(model: Any, plan: Plan, donor: Any = None) -> Any:
    """The hybrid of a base and a plan: the base's own modules, which no longer learn, and grafts with their first weights,
    which do.

    The base may bring grafts in other layers. donor: an open Transformer in the place of the one that the plan names. Raises
    UserError for a model of no family, and for sites that cannot be grafted.
    """
    family = family_of(model.config)
    if family is None:
        raise UserError(f"a {model.config.model_type} cannot be grafted; bases are {', '.join(sorted(FAMILIES))}")
    brought = [{**entry, "of_base": True} for entry in getattr(model.config, "grafts", None) or ()]
    for site in plan.sites:
        if site.layer in {entry["layer"] for entry in brought}:
            raise UserError(f"{site} holds a graft already; unsplice the model first")
    hybrid = contain(model, family.hybrid, convert(model.config, family.hybrid.config_class, brought))
    layers: dict[int, LayerStart] = {}
    for site in plan.sites:
        if site.layer >= (number := hybrid.config.num_hidden_layers):
            raise UserError(f"the model has no site {site}: it has layers 0 to {number - 1}")
        if hybrid.mixer_at(site.layer) is None:
            raise UserError(f"{site} cannot be grafted: layer {site.layer} holds no SSM")
    if plan.kind == "layer":
        layers = layer_starts(hybrid.config.hidden_size, plan, donor)
    hybrid.base_sample = sample(model)
    entries = [each.entry for each in layers.values()] or [describe(hybrid, site, plan) for site in plan.sites]
    for parameter in hybrid.parameters():
        parameter.requires_grad_(False)
    for entry in entries:
        own = hybrid.mixer_at(entry["layer"])
        hybrid.config.grafts.append(entry)
        hybrid.put_grafts(len(hybrid.config.grafts) - 1)
        mixer = hybrid.mixer_at(entry["layer"])
        with fetched(own):
            if layers:
                mixer.replaced = [own]
                fill_layer(mixer.graft, layers[entry["layer"]], plan.seed)
            else:
                start(mixer, plan)
            mixer.graft.to(own.out_proj.weight.device, graft_dtype(hybrid, own.out_proj)).train(model.training)
    if getattr(hybrid, "is_quantized", False):  # a folder of the hybrid has to say that the grafts are not
        settings = model.config.to_dict()["quantization_config"]
        grafts = [name for name, _ in hybrid.named_modules() if name.endswith(".graft")]
        skipped = {*model.hf_quantizer.modules_to_not_convert, *(settings.get("llm_int8_skip_modules") or ()), *grafts}
        hybrid.config.quantization_config = settings | {"llm_int8_skip_modules": sorted(skipped)}
    return hybrid


def unsplice(hybrid: Any) -> Any:
    """The base that a hybrid was made from, with the same modules and parameters, which learn again. Without adapters: those
    that PEFT put into the hybrid stay there. Says so where the base's weights were changed since. Raises UserError for a model
    that is no hybrid."""
    family = family_of(hybrid.config)
    if family is None or not isinstance(hybrid, family.hybrid):
        raise UserError(f"a {type(hybrid).__name__} is no hybrid; unsplice takes one, without PEFT's wrapper around it")
    if any(isinstance(mixer, LayerGraftMixer) and not mixer.replaced for mixer in hybrid.own_mixers()):
        raise UserError("the folder of a hybrid does not hold what a layer graft replaced; load the base instead")
    beneath = [entry for entry in hybrid.config.grafts if entry.get("of_base")]
    kind = family.hybrid if beneath else family.base
    base = contain(hybrid, kind, convert(hybrid.config, kind.config_class, beneath), with_adapters=False)
    if changed := changed_since_splice(hybrid):
        what = f"{len(changed)} of its tensors were changed ('{changed[0]}')"
        say(f"unsplice: this is not the base that was spliced: {what}; load it again")
    for parameter in base.parameters():
        if is_plain(parameter):
            parameter.requires_grad_(True)
    return base


def sample(model: Any) -> dict[str, Tensor]:
    """Some numbers of every parameter, also of what layer grafts have replaced, by its name without PEFT's layers; none of one
    that is quantised or that accelerate keeps elsewhere."""
    own = dict(model.named_parameters())
    for name, module in model.named_modules():
        for mixer in module.replaced if isinstance(module, LayerGraftMixer) else ():
            own |= {f"{name}.{part}": parameter for part, parameter in mixer.named_parameters()}
    return {
        name.replace(".base_layer.", "."): p.detach().flatten()[:: p.numel() // SAMPLE + 1].cpu().clone()
        for name, p in own.items()
        if is_plain(p) and not p.is_meta
    }


def changed_since_splice(hybrid: Any) -> list[str]:
    """The base's tensors in a hybrid that hold other values than when it was spliced or loaded, in any dtype: somebody merged a
    LoRA into them, or trained them."""
    before: dict[str, Tensor] = getattr(hybrid, "base_sample", {})
    now = sample(hybrid) if before else {}
    return [name for name, each in before.items() if name in now and not torch.equal(each.to(now[name].dtype), now[name])]


def describe(hybrid: Any, site: Site, plan: Plan) -> dict[str, Any]:
    """The entry of the hybrid configuration's `grafts` for the heads of one layer. Raises UserError for heads that the layer
    lacks, and for a width below the state size."""
    mixer = hybrid.mixer_at(site.layer)
    if max(site.heads) >= mixer.num_heads:
        raise UserError(f"the model has no site {site}: layer {site.layer} has heads 0 to {mixer.num_heads - 1}")
    starts = [plan.start(site.layer, head) for head in site.heads]
    size = mixer.ssm_state_size
    width = plan.width or (max(NARROWEST, size) if mixer.widens else size)
    if width < size or (width > size and not mixer.widens):
        need = "at least" if mixer.widens else "exactly"
        raise UserError(f"width: {width} is not possible; a graft of this model needs {need} its state size, {size}")
    entry = {
        "kind": "head",
        "layer": site.layer,
        "heads": list(site.heads),
        "signs": [each.sign for each in starts],
        "width": width,
        "time_step": mixer.has_time_step,
        "gated": True,
        "null": any(each.null is not None for each in starts),
        "closed_below": plan.closed_below,
    }
    if any(each.null_query for each in starts):
        entry["null_query"] = True
    if issubclass(mixer.graft_class, ChannelGraft):  # channels that start alike share a query-key pair
        pairs: dict[Start, list[int]] = {}
        for place, each in enumerate(starts):
            pairs.setdefault(each, []).append(place)
        entry |= {"pairs": list(pairs.values()), "signs": [each.sign for each in pairs]}
    return entry


@torch.no_grad()
def start(mixer: Any, plan: Plan) -> None:
    """The dual start of a graft: queries are the base's C and keys its B, or what takes their place there. Dimensions beyond
    the state size begin with random queries and zero keys, which add exactly nothing to the scores."""
    graft, layer = mixer.graft, mixer.layer_idx
    firsts = graft.heads
    if isinstance(graft, ChannelGraft):
        firsts = [graft.heads[places[0]] for places in graft.pairs]
    groups = [head // (mixer.num_heads // mixer.n_groups) for head in firsts]
    starts = [plan.start(layer, head) for head in firsts]
    graft.log_tau.copy_(torch.tensor([each.tau for each in starts]).log())
    graft.gate.fill_(plan.gate)
    if graft.null is not None:
        graft.null.copy_(torch.tensor([ABSENT if each.null is None else each.null / NATS for each in starts]))
    for row, each in enumerate(starts if graft.null_query is not None else ()):
        if len(each.null_query) > graft.width:
            raise UserError(
                f"L{layer}: the plan's null_query has {len(each.null_query)} numbers; its queries have {graft.width}"
            )
        graft.null_query[row, : len(each.null_query)] = torch.tensor(each.null_query)
    random = torch.Generator().manual_seed(plan.seed * 1009 + layer)
    rows = mixer.query_key_rows(dense)
    half = len(starts) * graft.width
    for side, part, proj in (("q", slice(0, half), graft.q_proj), ("k", slice(half, 2 * half), graft.k_proj)):
        weight, bias, taps, taps_bias = rows[side]
        widen(proj.weight, weight, groups, weight.std().item() if side == "q" else 0.0, random)
        if taps is not None:
            widen(graft.qk_conv.weight[part], taps, groups, taps.std().item(), random)
        if bias is not None:
            widen(proj.bias, bias, groups, 0.0, random)
        if taps_bias is not None:
            widen(graft.qk_conv.bias[part], taps_bias, groups, 0.0, random)


def widen(target: Tensor, base: Tensor, groups: list[int], extra: float, random: torch.Generator) -> None:
    """Fill `target` (pairs * width, ...) from `base` (groups, n, ...): each pair from its group; the dimensions beyond n are
    normal with standard deviation `extra`."""
    view = target.view(len(groups), -1, *target.shape[1:])
    view.copy_(torch.randn(view.shape, generator=random) * extra)
    view[:, : base.shape[1]] = base[groups].to(view.device, view.dtype)


def contain(source: Any, kind: Any, config: Any, with_adapters: bool = True) -> Any:
    """A model of another class around the modules and parameters of `source`, by name. with_adapters: or the modules that PEFT
    has wrapped. Raises UserError for what the source lacks, and for a hybrid in the code that its folder carries."""
    if getattr(source.config, "grafts", None) and type(source).__module__.startswith("transformers_modules"):
        raise UserError("this hybrid runs the code of its folder; open it with surgery.load(FOLDER)")
    with torch.device("meta"):
        model = kind(config)
    modules: dict[str, Any] = dict(source.named_modules())
    for name, module in source.named_modules():  # what layer grafts have replaced is there as well
        for mixer in module.replaced if isinstance(module, LayerGraftMixer) else ():
            modules = {f"{name}.{part}": each for part, each in mixer.named_modules() if part} | modules
    for name, module in list(model.named_modules()):
        theirs = modules.get(name)
        if theirs is None:
            wanted = f"the module '{name}' of a {config.model_type}"
            raise UserError(f"a {type(source).__name__} lacks {wanted}; give the model itself, without a wrapper around it")
        if isinstance(module, LayerGraftMixer):
            module.replaced = theirs.replaced
        elif isinstance(theirs, LayerGraftMixer):
            (theirs,) = theirs.replaced
        if next(module.children(), None) is None:
            wrappers = () if with_adapters else ("base_layer", "original_module")  # of PEFT
            while (wrapper := next((each for each in wrappers if hasattr(theirs, each)), None)) is not None:
                theirs = getattr(theirs, wrapper)
            model.set_submodule(name, theirs)
            continue
        for leaf in list(module._parameters):
            module._parameters[leaf] = theirs._parameters[leaf]
        for leaf in list(module._buffers):
            module._buffers[leaf] = theirs._buffers[leaf]
        if (hook := copy.copy(getattr(theirs, "_hf_hook", None))) is not None:  # tensors are fetched from the same place
            from accelerate.hooks import add_hook_to_module  # whoever has a hook has accelerate

            if hasattr(hook, "hooks"):  # several in a row
                hook.hooks = tuple(map(copy.copy, hook.hooks))
            add_hook_to_module(module, hook)
    for note in NOTES:
        if note in vars(source):
            setattr(model, note, vars(source)[note])
    model.generation_config = copy.deepcopy(getattr(source, "generation_config", None))
    return model.train(source.training)


@contextmanager
def fetched(module: nn.Module) -> Iterator[None]:
    """While this lasts, the tensors of a module and of all its parts have values, also where accelerate keeps them away."""
    hooked = [part for part in module.modules() if hasattr(part, "_hf_hook")]
    for part in hooked:
        part._hf_hook.pre_forward(part)  # type: ignore[operator, union-attr]
    try:
        yield
    finally:
        for part in hooked:
            part._hf_hook.post_forward(part, None)  # type: ignore[operator, union-attr]


def convert(config: Any, kind: Any, grafts: list[dict[str, Any]]) -> Any:
    """A configuration of another class, with the fields that a base and its hybrid have in common."""
    fields = {name: value for name, value in copy.deepcopy(config.to_dict()).items() if name not in OWN}
    if "grafts" in getattr(kind, "__dataclass_fields__", {}):
        fields["grafts"] = grafts
    other = kind(**fields)
    for name in CHOSEN:
        if (value := getattr(config, name, None)) is not None:
            setattr(other, name, value)
    return other


def graft_dtype(model: Any, module: nn.Module) -> torch.dtype:
    """The dtype of a graft beside a module."""
    weight: Any = module.weight
    return weight.dtype if is_plain(weight) else model.dtype


def dense(module: Any) -> Tensor:
    """The weight (out, in) of a linear module in floating point: its own, or what its integers stand for. Raises UserError if
    they are of another method than bitsandbytes."""
    if is_plain(module.weight):
        return module.weight
    if type(module.weight).__name__ not in ("Int8Params", "Params4bit"):
        raise UserError(f"a base quantised as {type(module).__name__} cannot be grafted; use bitsandbytes, or floating point")
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    return dequantize_bnb_weight(module.weight, getattr(module, "state", None)).reshape(module.out_features, -1)
