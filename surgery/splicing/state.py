"""A smaller state, as a plan says (Plan.kept_state).

A grafted head without a gate has no state already. What the others keep is as large as it was for retrieval, and may be cut
once attention retrieves: of B and C some rows go, everywhere as many, and with them so much of the state in the cache.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.families import family_of
from surgery.models.anatomy import mixer_at
from surgery.models.offloaded import is_offloaded
from surgery.models.quantised import is_quantised

FIELDS = ("state_size", "ssm_state_size", "mamba_d_state")  # what configurations call the size of a state
Kept = Mapping[str, Sequence[Sequence[int]]]


def check_kept(model: PreTrainedModel, kept: Kept) -> None:
    """Raise UserError for dimensions that the model's state does not have, and for a layer with an SSM that is left out."""
    family, size = family_of(model.config), state_size(model)
    names = [f"L{layer}" for layer in family.graftable(model)]
    if set(kept) != set(names):
        odd = min(set(kept) ^ set(names))
        raise UserError(f"kept_state: {odd} is {'missing' if odd in names else 'no layer with an SSM'}; it names all of them")
    for name, groups in kept.items():
        n_groups = getattr(mixer_at(model, int(name[1:])), "n_groups", 1)
        if len(groups) != n_groups or any(max(group) >= size for group in groups):
            raise UserError(
                f"kept_state: {name} has {n_groups} B/C groups, each with the dimensions 0 to {size - 1} of its state"
            )


def state_size(model: PreTrainedModel) -> int:
    """The dimensions of the state of every head."""
    family: Any = family_of(model.config)
    return family.state_size(model.config)


def check_cuttable(hybrid: PreTrainedModel) -> None:
    """Raise UserError for a hybrid, or an adopted base, whose state cannot be cut."""
    if is_quantised(hybrid) or is_offloaded(hybrid):
        raise UserError("kept_state: a state is cut in a model that is whole in memory, and not quantised")
    family: Any = family_of(hybrid.config)
    mixer: Any = mixer_at(hybrid, family.graftable(hybrid)[0])
    family.cut(mixer, torch.zeros(getattr(mixer, "n_groups", 1), 1, dtype=torch.long))


def with_less_state(hybrid: PreTrainedModel, kept: Kept) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The hybrid whose state has the dimensions `kept` alone, without values, and those of its tensors that became smaller, by
    name. Raises UserError where a state cannot be cut, or has no such dimensions."""
    check_cuttable(hybrid)
    check_kept(hybrid, kept)
    family = family_of(hybrid.config)
    names, cut = {module: name for name, module in hybrid.named_modules()}, {}
    for layer in family.graftable(hybrid):
        mixer = mixer_at(hybrid, layer)
        parameters = dict(mixer.named_parameters())
        with torch.no_grad():
            for name, tensor in family.cut(mixer, torch.tensor(kept[f"L{layer}"])).items():
                full = f"{names[mixer]}.{name}"
                cut[full] = nn.Parameter(tensor, parameters[name].requires_grad) if name in parameters else tensor
    config = copy.deepcopy(hybrid.config)
    setattr(config, next(name for name in FIELDS if hasattr(config, name)), len(next(iter(kept.values()))[0]))
    grafts = [graft | {"whole_state": state_size(hybrid)} for graft in hybrid.config.grafts]
    return family.empty(config, None, grafts), cut
