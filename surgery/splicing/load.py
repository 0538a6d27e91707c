"""Loading a base or a hybrid, as it is or as a patch that is joined to its base: load(), with which everything begins."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.loading.checkpoint import (
    BALANCED,
    DISK,
    holds_tokenizer,
    load_base,
    open_folder,
    read_tokenizer,
    spread,
    tokenizer_source,
)
from surgery.loading.devices import check_device, same_device
from surgery.loading.digests import fingerprint, named_dtype
from surgery.loading.hub import check_hybrid, local_folder, one_line
from surgery.loading.opened import Checkpoint, a_type, model_of
from surgery.loading.sharing import is_all_in, share_equal, shareable
from surgery.models.quantised import converted
from surgery.records.plan import PATCH, PLAN, Plan
from surgery.splicing.joining import Patch, join
from surgery.splicing.remembered import Opened, Surgery, read_surgery, remember
from surgery.splicing.splice import freeze


def load(
    name: str | Path,
    *,
    tokenizer: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    base: str | None = None,
    revision: str | None = None,
    beside: PreTrainedModel | Checkpoint | None = None,
) -> Checkpoint:
    """Load a base or a hybrid.

    name: a Hub id (at its newest revision unless another is given), a Hugging Face folder, an original state-spaces folder, or
    a patch, which is joined to its base; base: where that is, if not under the name that the patch records. tokenizer: where to
    take the tokenizer from if not from the same place (of a patch without: its base). dtype: "auto" (as stored) or a torch
    name; tensors are converted one by one, so that a model is never held twice. Weights are read from safetensors, or from
    pickles that hold nothing but tensors.

    device: a torch device, or "balanced": the layers are spread over all accelerators, for a model that is larger than one (on
    the CPU where there is none). accelerate's hooks then carry what flows from layer to layer, and belong to this very model: a
    splice of it, or adopt(), makes another one without them, which runs only if all its layers lie on one device. Or "disk":
    weights stay in their files, and each is read from there whenever its module is called. That takes the memory of a few
    layers, and long: it is for models that do not fit otherwise. Quantised ones cannot be loaded so.

    beside: a model that is open. What the new one has in common with it, bit for bit, is held once: a hybrid, or a patch on it,
    costs the memory of its grafts. Neither is to be changed in place; tuning a hybrid's grafts does not. A patch on it uses its
    parameters, which are then frozen, as splice() does.

    Raises UserError in one line for anything that cannot be loaded exactly, or onto its devices.
    """
    if not isinstance(name, str | Path):
        taken = "; a model is taken as it is, with tokenizer=, by surgery.locate and the others"
        raise UserError(f"surgery.load takes a Hub id or a folder, not {a_type(name)}{taken}")
    name = str(name)
    if device not in (BALANCED, DISK):
        check_device(device)
    folder = local_folder(name, revision)
    torch_dtype = named_dtype(dtype)
    other = None if beside is None else model_of(beside, "load")
    if other is not None and (device in (BALANCED, DISK) or not shareable(other) or not same_device(other.device, device)):
        other = None
    model: Any
    try:
        if (folder / PATCH).exists():
            model, tokenizer_folder = _load_patch(name, folder, base, other, torch_dtype, device)
            tokenizer_folder = folder if holds_tokenizer(folder) else tokenizer_folder
            model = model if torch_dtype is None else converted(model, torch_dtype, name)
        elif base is not None:
            raise UserError(f"{name} is not a patch, and takes no base")
        else:
            model, tokenizer_folder = open_folder(folder, torch_dtype, device, trust_remote_code), folder
        if other is not None:
            share_equal(model, other, folder)
        if device == BALANCED:
            spread(model, name)
        words = read_tokenizer(tokenizer or tokenizer_source(tokenizer_folder), trust_remote_code)
        model = model.eval() if device in (BALANCED, DISK) else model.eval().to(device)
    except UserError:
        raise
    except Exception as error:  # whatever a damaged file raises, the user gets one line
        raise UserError(f"cannot load {name}: {one_line(error)}") from error
    opened = Checkpoint(name, model, words, fingerprint(model))
    if not _grafted(model):
        remember(model, base=Opened(name, opened.fingerprint, words))
    elif (surgery := _surgery(model, folder, words)) is not None:  # else its attention is its own, as that of mamba2attn-2.7b
        remember(model, surgery)
        freeze(model)
    return opened


def _surgery(model: Any, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Surgery | None:
    """What was done to the base of a hybrid that was loaded from a folder; None if the folder does not say."""
    if (folder / PATCH).exists():
        return replace(model.surgery, tokenizer=tokenizer)
    return read_surgery(folder, tokenizer) if (folder / PLAN).exists() else None


def plan_of(folder: str | Path) -> Plan:
    """The plan of a hybrid's folder or patch. Raises UserError if it holds none."""
    folder = Path(check_hybrid(str(folder)))
    if (folder / PATCH).exists():
        return Patch.read(folder / PATCH).plan
    if not (folder / PLAN).exists():
        raise UserError(
            f"{folder} is no hybrid: it holds no {PLAN}. If it is a base, give it grafts first: "
            f"surgery splice {folder} PLAN --out HYBRID"
        )
    return Plan.read(folder / PLAN)


def _load_patch(
    name: str,
    folder: Path,
    base: str | None,
    other: PreTrainedModel | None,
    dtype: torch.dtype | None,
    device: str,
) -> tuple[PreTrainedModel, Path]:
    """The hybrid, and the folder of its base. other: a model that is open; if it is the base, that is not opened again."""
    patch = Patch.read(folder / PATCH)
    made_for = patch.base
    place, revision = (made_for.place(folder), made_for.revision) if base is None else (base, None)
    if base is None and not made_for.hub and not Path(place).is_dir():
        raise UserError(f"{name} is a patch on {place}, which is not here: say where its base is (--base)")
    base_folder = local_folder(place, revision)
    own = named_dtype(patch.dtype)
    # Whatever would convert the hybrid would convert the open model.
    if other is not None and not _grafted(other) and dtype in (None, own) and is_all_in(other, own):
        with suppress(UserError):  # it is another model; or the patch is damaged, which is found once more
            return join(other, folder), base_folder
    return join(load_base(place, revision, DISK if device == DISK else "cpu"), folder), base_folder


def _grafted(model: PreTrainedModel) -> bool:
    return bool(getattr(model.config, "grafts", None))
