"""splice, unsplice, and adopt (a splice of nothing).

The base's tensors are shared, never copied and never written: a hybrid costs the memory of its grafts, and unsplice is exact.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.families import Hybrid, family_of
from surgery.plan import Plan
from surgery.site import Site


def splice(base: PreTrainedModel, plan: Plan | None) -> PreTrainedModel:
    """The hybrid of `base` and `plan`: the base's own parameters, and grafts with their first weights.

    `base` is a stock model or an adopted one. Raises UserError if the plan names a site that the base lacks.
    """
    family = family_of(base.config)
    family.check(base.config)
    if getattr(base.config, "grafts", None):
        raise UserError("the model already holds grafts; unsplice it first")
    check_sites(base, plan.sites if plan else ())
    hybrid = family.empty(base.config, plan)
    _share(base, hybrid)
    for site in plan.sites if plan else ():
        assert plan is not None
        mixer = grafted_mixer(hybrid, site.layer)
        mixer.graft.to_empty(device=base.device)
        mixer.graft.to(mixer.out_proj.weight.dtype)
        family.initialise(mixer, plan)
    return hybrid


def check_sites(base: PreTrainedModel, sites: Iterable[Site]) -> None:
    """Raise UserError for the first site that the model lacks."""
    layers, heads = family_of(base.config).shape(base.config)
    for site in sites:
        if site.layer >= layers or max(site.heads, default=0) >= heads:
            raise UserError(f"the model has no site {site}: it has layers 0-{layers - 1} with heads 0-{heads - 1}")


def check_base(plan: Plan, fingerprint: str) -> None:
    """Raise UserError if the plan was made for another base."""
    if plan.provenance is not None and plan.provenance.base_fingerprint != fingerprint:
        raise UserError(f"the plan was made for another base ({plan.provenance.base}): the fingerprints differ")


def adopt(base: PreTrainedModel) -> PreTrainedModel:
    """The base in the hybrid's class (or its own, where a family has none), nothing spliced: the same function, served by this
    project's kernels."""
    return base if family_of(base.config).adopted(base) else splice(base, None)


def unsplice(hybrid: PreTrainedModel) -> PreTrainedModel:
    """The stock model that the hybrid was made from, with the same parameters."""
    base = family_of(hybrid.config).empty_base(hybrid.config)
    _share(hybrid, base)
    return base


def grafted_mixer(hybrid: Hybrid, layer: int) -> Any:
    """The mixer of a layer."""
    return hybrid.backbone.layers[layer].mixer


def graft_parameters(hybrid: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters that splice added, by name."""
    return {name: p for name, p in hybrid.named_parameters() if ".graft." in name}


def _share(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Let `target` use the parameters of `source`, wherever both have them."""
    trainable = {name: p.requires_grad for name, p in source.named_parameters()}
    wanted = target.state_dict().keys()
    tensors = {name: p for name, p in source.state_dict(keep_vars=True).items() if name in wanted}
    missing, _ = target.load_state_dict(tensors, strict=False, assign=True)
    if unshared := [name for name in missing if ".graft." not in name]:
        raise UserError(f"the base lacks the tensor '{unshared[0]}'")
    for name, p in source.named_parameters():
        p.requires_grad_(trainable[name])
    for name, buffer in source.named_buffers():  # those that state_dict leaves out
        owner, _, leaf = name.rpartition(".")
        target.get_submodule(owner)._buffers[leaf] = buffer
    target.generation_config = source.generation_config
    target.train(source.training)
