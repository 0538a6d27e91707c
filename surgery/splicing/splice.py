"""splice, unsplice, and adopt (a splice of nothing).

The base's tensors are shared, never copied and never written: a hybrid costs the memory of its grafts, and unsplice is exact.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.errors import UserError
from surgery.families import Hybrid, families, family_of
from surgery.hybrids.layer_graft import LayerGraftMixer, brings_only_layers
from surgery.hybrids.parts import is_quantised_weight
from surgery.hybrids.patching import drop_note, note_of, set_note
from surgery.loading.digests import fingerprint
from surgery.loading.opened import Checkpoint, model_of, plan_for
from surgery.models.anatomy import mixer_at
from surgery.models.offloaded import device_of, fetched, is_offloaded, placeholder, take_hooks
from surgery.models.quantised import exact, has_quantised_weight, is_quantised, note
from surgery.records.plan import Plan
from surgery.records.site import Site
from surgery.splicing.donor import DonorLayer, check_donor, fill_layer, layer_start
from surgery.splicing.induction import check_induction, fill_copy, fill_induction, token_inputs, token_outputs
from surgery.splicing.remembered import Surgery, opened, remember
from surgery.splicing.state import Kept, with_less_state
from surgery.splicing.windows import grafts_beneath, grafts_of_base, window_specs


def splice(
    base: PreTrainedModel | Checkpoint, plan: Plan, donor: PreTrainedModel | Checkpoint | None = None
) -> PreTrainedModel:
    """The hybrid of `base` and `plan`: the base's own parameters, and grafts with their first weights.

    Grafts learn and the base does not: its parameters, which the hybrid shares, are frozen until `unsplice` (requires_grad).
    `hybrid.surgery` remembers the plan and the base.

    base: a stock model or an adopted one, or what load() returned. donor: the model that the plan's grafts start from, if it
    names one; its weights are copied. Raises UserError if the plan names a site that the base or the donor lacks, or if what
    the donor has there does not fit, and for arguments of another type.
    """
    model, plan = model_of(base, "splice"), plan_for(plan, "splice")
    known = opened(base)
    hybrid = install(model, plan, None if donor is None else model_of(donor, "splice"))
    remember(hybrid, base=known, surgery=Surgery(
        plan, known.name if known else model.name_or_path or None, known.fingerprint if known else fingerprint(model),
        known.tokenizer if known else None,
    ))  # fmt: skip
    freeze(hybrid)
    return hybrid


def install(base: PreTrainedModel, plan: Plan, donor: PreTrainedModel | None = None) -> PreTrainedModel:
    """As splice, with every parameter of the base learning as before, and nothing remembered."""
    family = family_of(base.config)
    layers = check_plan(base, plan, donor)
    hybrid = family.empty(base.config, plan, _specs(base, plan, layers))
    inputs: dict[int, Tensor] = {}
    outputs: Tensor | None = None
    if plan.init in ("induction", "copy"):
        check_induction(base, [mixer_at(hybrid, site.layer) for site in plan.sites], plan)
        adopted = adopt(base)  # a stock model pads each single token to a chunk
        inputs = token_inputs(adopted, plan)
        outputs = token_outputs(adopted, plan) if plan.init == "copy" else None
    share(base, hybrid, "the base lacks the tensor '{}'")
    for site in plan.sites:
        graft, stock_mixer = mixer_at(hybrid, site.layer).graft, mixer_at(base, site.layer)
        out_proj = stock_mixer.out_proj if hasattr(stock_mixer, "out_proj") else stock_mixer.o_proj
        graft.to_empty(device=device_of(out_proj, out_proj.weight))
        graft.to(base.dtype if is_quantised_weight(out_proj.weight) else out_proj.weight.dtype)
    take_hooks(base, hybrid)
    for site in plan.sites:
        mixer = mixer_at(hybrid, site.layer)
        with fetched(mixer):
            if plan.kind == "layer":
                remove(base, hybrid, site.layer)
                fill_layer(mixer.graft, layers[site.layer], plan)
            else:
                family.initialise(mixer, plan)
                if plan.init in ("induction", "copy"):
                    fill_induction(mixer, plan, inputs[site.layer])
                if plan.init == "copy":
                    assert outputs is not None
                    fill_copy(mixer, inputs[site.layer], outputs)
    return cut_state(hybrid, plan.kept_state) if plan.kept_state else hybrid


def ungrafted(base: PreTrainedModel) -> PreTrainedModel:
    """The base in the hybrid's class without a graft but for layers that it brings, every parameter learning as before."""
    family = family_of(base.config)
    check_bare(base)
    model = family.empty(base.config, None, grafts_of_base(base))
    share(base, model, "the base lacks the tensor '{}'")
    take_hooks(base, model)
    return model


def cut_state(hybrid: PreTrainedModel, kept: Kept) -> PreTrainedModel:
    """The hybrid, or the adopted base, with the dimensions `kept` of its state alone (Plan.kept_state). It shares all tensors
    but those that become smaller. Raises UserError where a state cannot be cut, or has no such dimensions."""
    smaller, cut = with_less_state(hybrid, kept)
    whole = _tensors(hybrid)
    for name, tensor in cut.items():
        set_note(tensor, "learned", note_of(whole[name], "learned", whole[name].requires_grad))
    share(hybrid, smaller, "the hybrid lacks the tensor '{}'", cut)
    set_note(smaller, "whole", (hybrid.config, {name: whole[name] for name in cut}))
    return smaller


def hybrid_config(base: PreTrainedModel, plan: Plan) -> PreTrainedConfig:
    """The configuration that the hybrid will have. No weight of the base is looked at, which may be on the meta device, and no
    model is made. Raises UserError for whatever keeps the base from being grafted so."""
    check_start(base, plan)
    layers = check_plan(base, plan)
    return family_of(base.config).configured(base.config, plan, _specs(base, plan, layers))


def _specs(base: PreTrainedModel, plan: Plan, layers: Mapping[int, DonorLayer]) -> list[dict[str, Any]]:
    """The entries of the hybrid configuration's `grafts`, but for those of heads. layers: of layer grafts."""
    return [*grafts_of_base(base), *window_specs(base, plan.windows), *(start.spec for start in layers.values())]


def check_bare(base: PreTrainedModel, plan: Plan | None = None) -> None:
    """Raise UserError for a base that its family does not support, or that holds grafts; it may have whole
    layers of its own, beside which grafts of heads and windows can be put."""
    family_of(base.config).check(base.config)
    layers = plan is not None and plan.kind == "layer" and getattr(base.config, "grafts", None)
    if layers or not brings_only_layers(base.config):
        raise UserError("the model already holds grafts; unsplice it first")


def check_plan(base: PreTrainedModel, plan: Plan, donor: PreTrainedModel | None = None) -> dict[int, DonorLayer]:
    """What the grafts of layers start from. Raises UserError where grafts cannot start so."""
    check_bare(base, plan)
    check_sites(base, plan.sites)
    check_donor(plan, donor)
    return {site.layer: layer_start(base, plan, donor, site.layer) for site in plan.sites if plan.kind == "layer"}


def check_start(base: PreTrainedModel, plan: Plan) -> None:
    """Raise UserError where the plan's grafts cannot start as it says in such a base. No weight is looked at, and no model
    made: a mixer of each layer says it."""
    check_plan(base, plan)
    if plan.kind == "head":
        mixers = [family_of(base.config).grafted_mixer(base.config, plan, site) for site in plan.sites]
        if plan.init in ("induction", "copy"):
            check_induction(base, mixers, plan)


def check_sites(base: PreTrainedModel, sites: Iterable[Site]) -> None:
    """Raise UserError for the first site that the model lacks."""
    family = family_of(base.config)
    layers, heads = family.shape(base.config)
    for site in sites:
        if site.layer >= layers or max(site.heads, default=0) >= heads:
            raise UserError(f"the model has no site {site}: it has layers 0-{layers - 1} with heads 0-{heads - 1}")
        if site.layer not in family.graftable(base):
            raise UserError(f"{site} cannot be grafted: layer {site.layer} holds no SSM, whose heads become attention")


def check_base(plan: Plan, fingerprint: str) -> None:
    """Raise UserError if the plan was made for another base."""
    if plan.provenance is not None and plan.provenance.base_fingerprint != fingerprint:
        opened = f"{plan.provenance.base}, dtype {plan.dtype}"
        raise UserError(f"the plan was made for another base, or in another dtype ({opened}): the fingerprints differ")


def adopt(base: PreTrainedModel) -> PreTrainedModel:
    """The base in the hybrid's class, nothing spliced: the same function, served by this project's kernels. A model of no
    family here stays as it is: it can be measured, and located in."""
    base = model_of(base, "adopt")
    family = families().get(base.config.model_type)
    return base if family is None or family.adopted(base) else ungrafted(base)


def unsplice(hybrid: PreTrainedModel) -> PreTrainedModel:
    """The stock model that the hybrid was made from, with the same parameters, which learn again as they did before.

    Raises UserError if a layer graft replaced some of them, or the plan cut their state, and the hybrid was loaded from a
    folder, which does not hold them.
    """
    hybrid = model_of(hybrid, "unsplice")
    base, learned = stock(hybrid), note_of(hybrid, "learned", {})
    for name, parameter in base.named_parameters():
        if name in learned:
            parameter.requires_grad_(learned[name])
            drop_note(parameter, "learned")
    return base


def freeze(hybrid: PreTrainedModel) -> None:
    """Let grafts alone learn. What learned before is remembered for unsplice, in each parameter too: the next hybrid of the
    same base finds them frozen."""
    grafts = graft_parameters(hybrid)
    base = {name: tensor for name, tensor in _tensors(hybrid).items() if name not in grafts}
    learned = {name: note_of(tensor, "learned", tensor.requires_grad) for name, tensor in base.items()}
    set_note(hybrid, "learned", learned)
    for name, tensor in base.items():
        set_note(tensor, "learned", learned[name])
        tensor.requires_grad_(False)


def stock(hybrid: PreTrainedModel) -> PreTrainedModel:
    """As unsplice, with the parameters frozen as they are in the hybrid, which goes on with them."""
    config, whole = note_of(hybrid, "whole", (hybrid.config, {}))
    if not whole and (known := getattr(hybrid, "surgery", None)) is not None and known.plan.kept_state:
        raise UserError("the folder of a hybrid does not hold what its state was cut from; load the base instead")
    family, beneath = family_of(config), grafts_beneath(config)
    base = family.empty(config, None, beneath) if beneath else family.empty_base(config)
    now = _tensors(hybrid)  # a hybrid that was moved, or converted, has them there
    uncut = {name: _like(tensor, now[name]) for name, tensor in whole.items()}
    share(hybrid, base, "the folder of a hybrid does not hold what a layer graft replaced ('{}'); load the base instead", uncut)
    take_hooks(hybrid, base)
    return base


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor itself, or where the other one has another device or dtype, a copy there."""
    if (tensor.device, tensor.dtype) == (other.device, other.dtype):
        return tensor
    moved = tensor.detach().to(other.device, other.dtype)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def graft_parameters(hybrid: Any) -> dict[str, nn.Parameter]:
    """The parameters that splice added, by name."""
    is_added = added(hybrid)
    return {name: p for name, p in hybrid.named_parameters() if is_added(name)}


def added(hybrid: Any) -> Callable[[str], bool]:
    """Whether what has some name in a hybrid is in a graft that splice added, and not in one of its base."""
    beneath = tuple(
        hybrid.block_name(spec["layer"]) for spec in getattr(hybrid.config, "grafts", None) or () if spec.get("of_base")
    )
    return lambda name: ".graft." in name and not name.startswith(beneath)


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and buffers by name, as they are without what layer grafts replaced and adapters changed."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    for module in model.modules():
        if isinstance(module, LayerGraftMixer):
            tensors |= module.removed
    return tensors | note_of(model, "unadapted", {})


def _quantised(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules whose weights are quantised, by name, also those that layer grafts replaced."""
    modules = {name: module for name, module in model.named_modules() if has_quantised_weight(module)}
    for module in model.modules():
        if isinstance(module, LayerGraftMixer):
            modules |= module.removed_modules
    return modules


def remove(base: PreTrainedModel, hybrid: Hybrid, layer: int) -> None:
    """Let the graft of a layer keep what the base has in that layer and the hybrid has no place for."""
    mixer, here = mixer_at(hybrid, layer), hybrid.block_name(layer)
    kept = {name for name, _ in (*hybrid.named_parameters(), *hybrid.named_buffers())}
    mixer.removed = {name: tensor for name, tensor in _tensors(base).items() if name.startswith(here) and name not in kept}
    names = {name for name, _ in hybrid.named_modules()}
    mixer.removed_modules = {n: module for n, module in _quantised(base).items() if n.startswith(here) and n not in names}


def share(source: PreTrainedModel, target: PreTrainedModel, lacking: str, instead: Mapping[str, Tensor] | None = None) -> None:
    """Let `target` use the parameters of `source`, wherever both have them, and its quantised modules; what accelerate has put
    away comes with its hooks (take_hooks). lacking: what to say of a parameter that only `target` has. instead: tensors, by
    name, that it has in the place of the source's."""
    if is_quantised(source) and is_offloaded(source):
        raise UserError(
            "accelerate has offloaded quantised weights of this model to the CPU or the disk, which only their own modules can "
            "fetch; load it whole on the CPU, splice and export it there, and load the export with a device_map"
        )
    exact(source)
    names = {name for name, _ in target.named_modules()}
    for name, module in _quantised(source).items():
        if name in names:
            target.set_submodule(name, module)
    tensors = {name: placeholder(tensor) if tensor.is_meta else tensor for name, tensor in _tensors(source).items()}
    tensors |= instead or {}
    trainable = {name: tensor.requires_grad for name, tensor in tensors.items()}
    shared = {name: tensors[name] for name in target.state_dict() if name in tensors}
    missing, _ = target.load_state_dict(shared, strict=False, assign=True)
    if unshared := [name for name in missing if ".graft." not in name]:
        raise UserError(lacking.format(unshared[0]))
    for name, tensor in tensors.items():
        tensor.requires_grad_(trainable[name])
    for name in [name for name, _ in target.named_buffers() if name in tensors]:  # also those that state_dict leaves out
        owner, _, leaf = name.rpartition(".")
        target.get_submodule(owner)._buffers[leaf] = tensors[name]
    if is_quantised(source):
        note(source, target, [name for name, _ in target.named_modules() if name.endswith(".graft")])
    remember(target, base=opened(source))
    target.generation_config = source.generation_config
    target.train(source.training)
