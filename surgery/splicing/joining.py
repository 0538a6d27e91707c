"""A patch: all that surgery changed in a base, small enough for a mail. This is what joins it to the base again.

patch.safetensors holds the tensors that the hybrid has and the base has not, or not with these values; patch.json says what
else differs, and which base it belongs to, tensor by tensor. A digest is of the tensor as the base's folder gives it, so a copy
in another precision is another base.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.errors import UserError
from surgery.families import family_of
from surgery.families.dual_start import OWN
from surgery.hybrids.layer_graft import LayerGraftMixer
from surgery.hybrids.windows import is_window
from surgery.loading.digests import file_digest, fingerprint, function_of
from surgery.loading.origin import Origin
from surgery.models.anatomy import mixer_at
from surgery.models.answers import held, tensor_digest
from surgery.models.offloaded import is_offloaded, keep, take_hooks
from surgery.models.quantised import converted
from surgery.records.plan import PATCH, Plan
from surgery.records.reading import shown
from surgery.records.record import Environment
from surgery.splicing.remembered import Surgery, remember
from surgery.splicing.splice import remove, share

WEIGHTS = "patch.safetensors"


class Patch(Environment):
    """patch.json.

    dtype: of the hybrid; the base's tensors are converted to it. grafts: of the hybrid's configuration. config: its other
    fields that differ from the base's. removed: the base's tensors that the hybrid has no place for. base_tensors: by name,
    "dtype shape sha256" of every tensor of the base, tied ones once. weights: sha256 of patch.safetensors.
    """

    schema_version: int = 3
    base: Origin
    plan: Plan
    dtype: str
    grafts: list[dict[str, Any]]
    config: dict[str, Any]
    removed: tuple[str, ...]
    base_tensors: dict[str, str]
    weights: str
    base_config: dict[str, str] = {}
    """The fields of the base's configuration that its function depends on, as JSON."""


def config_texts(config: Any) -> dict[str, str]:
    """What Patch.base_config says of a configuration. Of the version of transformers: a field that only one of two
    configurations has says nothing."""
    return {name: json.dumps(value, sort_keys=True, default=str) for name, value in function_of(config).items()}


def check_config(patch: Patch, base: PreTrainedModel) -> None:
    """Raise UserError, by its name, for the first field of the base's configuration that is not as it was when the patch was
    made: with another one the same tensors compute something else."""
    actual = config_texts(base.config)
    for name, text in patch.base_config.items():
        if name in actual and actual[name] != text:
            raise UserError(
                f"this is not the base that the patch was made for ({patch.base.name}): its configuration says '{name}': "
                f"{shown(actual[name])}, not {shown(text)}"
            )


def check_tensors(patch: Patch, base: PreTrainedModel) -> None:
    """Raise UserError, by its name, for the first tensor of the base that is not the one which the patch was made for."""
    refused, present = f"this is not the base that the patch was made for ({patch.base.name})", set()
    for name, tensor in held(base):
        present.add(name)
        if name not in patch.base_tensors:
            continue
        expected, actual = patch.base_tensors[name], tensor_digest(tensor)
        for part, (expected_part, actual_part) in enumerate(zip(expected.split(" "), actual.split(" "), strict=True)):
            if expected_part != actual_part and part == 0:
                raise UserError(
                    f"{refused}: '{name}' is {actual_part}, not {expected_part}; a copy in another precision will not do"
                )
            if expected_part != actual_part:
                raise UserError(
                    f"{refused}: the tensor '{name}' differs{f': {actual_part}, not {expected_part}' if part == 1 else ''}"
                )
    if missing := [name for name in patch.base_tensors if name not in present]:
        raise UserError(f"{refused}: the tensor '{missing[0]}' is missing")
    if unknown := present - set(patch.base_tensors):
        raise UserError(f"{refused}: it has a tensor '{min(unknown)}', which the patch does not know")


def join(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The hybrid of a base, as its folder gives it, and a patch. It uses the base's own tensors, and fetches what that fetches.

    Raises UserError if the patch is damaged or belongs to another base.
    """
    patch = Patch.read(folder / PATCH)
    weights = _weights(folder, patch.weights)
    check_tensors(patch, base)
    check_config(patch, base)
    hybrid = empty_joined(base.config, patch, folder)
    shapes = {name: tensor.shape for name, tensor in base.state_dict().items()}
    for name, tensor in hybrid.state_dict().items():
        if name in weights and weights[name].shape != tensor.shape:
            raise UserError(f"{folder / WEIGHTS} does not fit {PATCH}: the tensor '{name}' has another shape than that says")
    resized = {name: tensor for name, tensor in weights.items() if tensor.shape != shapes.get(name, tensor.shape)}
    share(converted(base, getattr(torch, patch.dtype), patch.base.name), hybrid, "the base lacks the tensor '{}'", resized)
    state, away = hybrid.state_dict(), set(base.state_dict()) if is_offloaded(base) else set()
    lacking = [name for name, tensor in state.items() if tensor.is_meta and name not in weights and name not in away]
    for name in (*lacking, *sorted(set(weights) - set(state))):
        what = "lacks the tensor" if name in lacking else "holds a tensor that the hybrid has no place for,"
        raise UserError(f"{folder / WEIGHTS} {what} '{name}'")
    hybrid.load_state_dict(weights, strict=False, assign=True)
    take_hooks(base, hybrid)
    keep(hybrid, weights)
    for graft in (spec for spec in patch.grafts if not spec.get("of_base") and not is_window(spec)):
        mixer = mixer_at(hybrid, graft["layer"])
        if isinstance(mixer, LayerGraftMixer):
            remove(base, hybrid, graft["layer"])
    remember(hybrid, Surgery(patch.plan, patch.base.place(folder), fingerprint(base, patch.dtype)))
    return hybrid


def empty_joined(base: PreTrainedConfig, patch: Patch, folder: Path) -> PreTrainedModel:
    """The hybrid of a base's configuration and a patch, without values in its tensors."""
    config = copy.deepcopy(base)
    for name, value in patch.config.items():
        if name in OWN or name not in base.to_dict():  # nothing here may name code
            raise UserError(f"{folder / PATCH} changes '{name}' of the configuration, which is no field of the base's")
        setattr(config, name, value)
    return family_of(base).empty(config, None, patch.grafts)


def _weights(folder: Path, digest: str) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    try:
        if file_digest(path) != digest:
            raise UserError(f"{path} is damaged: it is not the file that {PATCH} describes")
        return load_file(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
