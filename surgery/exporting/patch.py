"""A patch: all that surgery changed in a base, small enough for a mail, and how it is joined to the base again.

patch.safetensors holds the tensors that the hybrid has and the base has not, or not with these values; patch.json says what
else differs, and which base it belongs to, tensor by tensor. A base in another precision is another base. Patches of version
0.30 (schema 3) are read.
"""

import copy
import hashlib
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.exporting.origin import Origin, find_origin
from surgery.exporting.tokenizer import save_tokenizer
from surgery.modeling import family_of
from surgery.models.digests import tokenizer_digest
from surgery.models.load import as_dtype, load, read_tokenizer
from surgery.records.record import Record
from surgery.runtime.files import file_digest
from surgery.splicing.splice import adopt, sample

RECORD, WEIGHTS = "patch.json", "patch.safetensors"
# Fields of a configuration that differ though the model does not, or that name code.
BOOKKEEPING = set("model_type architectures grafts auto_map layer_types transformers_version".split())
BOOKKEEPING |= set("dtype torch_dtype name_or_path _name_or_path _attn_implementation".split())
HASHES = 4  # threads
OF_TOKENIZER = attrgetter("chat_template", "special_tokens_map", "model_max_length", "padding_side")


class Patch(Record):
    """patch.json."""

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)

    schema_version: Literal[3, 4] = 4
    base: Origin
    dtype: str
    """Of the hybrid; the base's tensors are converted to it."""
    grafts: list[dict[str, Any]]
    """Of the hybrid's configuration."""
    config: dict[str, Any]
    """Other fields of the hybrid's configuration that differ from the base's."""
    removed: tuple[str, ...]
    """The base's tensors that the hybrid has no place for."""
    base_tensors: dict[str, str]
    """Name -> "dtype shape sha256" of every tensor of the base, tied ones once."""
    weights: str
    """sha256 of patch.safetensors."""


def write_patch(
    hybrid: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, base: str | Path, home: Path
) -> None:
    """Write the patch of a hybrid to its base. base: the base's folder or Hub id. home: where `folder` will lie."""
    original, words = load(base, dtype="stored")
    if getattr(original.config, "grafts", None):
        raise UserError(f"{base} holds grafts, so it is no base for a patch; name the base with --base")
    before, after = unique_tensors(original), unique_tensors(hybrid)
    changed = {
        name: tensor.contiguous().clone()
        for name, tensor in after.items()
        if name not in before or not _same(before[name].to(hybrid.dtype), tensor)
    }
    if not any(name in after and name not in changed for name, tensor in before.items() if tensor.dim() > 1):
        raise UserError(f"none of the hybrid's weight matrices is one of {base}; name its base with --base")
    save_file(changed, folder / WEIGHTS, metadata={"format": "pt"})
    if tokenizer_digest(words) != tokenizer_digest(tokenizer) or OF_TOKENIZER(words) != OF_TOKENIZER(tokenizer):
        save_tokenizer(tokenizer, folder)
    hybrid.generation_config.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    theirs, fields = original.config.to_dict(), hybrid.config.to_dict()
    Patch(
        base=find_origin(base, home),
        dtype=str(hybrid.dtype).removeprefix("torch."),
        grafts=fields["grafts"],
        config={name: value for name, value in fields.items() if name not in BOOKKEEPING and theirs.get(name) != value},
        removed=tuple(name for name in before if name not in after),
        base_tensors=tensor_digests(before),
        weights=file_digest(folder / WEIGHTS),
    ).write(folder / RECORD)
    config = copy.deepcopy(hybrid.config)  # by config.json an engine knows what to build; it names no code
    config.architectures, config.auto_map = [type(hybrid).__name__], {}
    config.to_json_file(folder / "config.json")


def join_patch(folder: str | Path, base: str | Path | None = None, device: str = "auto") -> tuple[PreTrainedModel, Any]:
    """(the hybrid of a patch and its base, the tokenizer). base: where the base is, if not where the patch says. device: of
    load(). Raises UserError if the patch is damaged or belongs to another base."""
    folder = Path(folder)
    patch = Patch.read(folder / RECORD)
    place = patch.base.place(folder) if base is None else base
    if not patch.base.hub and not Path(place).is_dir():
        join = f"join them first: surgery export {folder} --base BASE --out HYBRID"
        raise UserError(f"{folder} is a patch on {patch.base.name}, which is not here; {join}")
    revision = patch.base.revision if str(place) == patch.base.name else None  # of the Hub
    original, tokenizer = load(place, dtype="stored", device=device, revision=revision)
    if (folder / "tokenizer_config.json").exists():
        tokenizer = read_tokenizer(folder)
    path = folder / WEIGHTS
    try:
        if file_digest(path) != patch.weights:
            raise UserError(f"{path} is damaged: it is not the file that {RECORD} describes")
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    digests = tensor_digests(unique_tensors(original))
    refused = f"this is not the base that the patch was made for ({patch.base.name})"
    if strays := sorted(digests.keys() ^ patch.base_tensors.keys()):
        raise UserError(f"{refused}: {'it lacks' if strays[0] in patch.base_tensors else 'the patch knows no'} '{strays[0]}'")
    if other := next((name for name, digest in digests.items() if digest != patch.base_tensors[name]), None):
        raise UserError(f"{refused}: the tensor '{other}' differs (a copy in another precision is another base)")
    return _join(patch, weights, original, folder), tokenizer


def _join(patch: Patch, weights: dict[str, Tensor], original: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The hybrid: the base's own modules in the hybrid's class, with the patch's grafts and values."""
    unknown = sorted(name for name in patch.config if name in BOOKKEEPING or name not in original.config.to_dict())
    if unknown:
        raise UserError(f"{folder / RECORD} changes '{unknown[0]}' of the configuration, which is no field of the base's")
    family = family_of(original.config)
    if family is None:
        raise UserError(f"a {original.config.model_type} cannot be grafted, so {folder} is no patch for it")
    base = adopt(as_dtype(original, getattr(torch, patch.dtype)))
    config = copy.deepcopy(base.config)
    for name, value in patch.config.items():
        setattr(config, name, value)
    config.grafts = patch.grafts
    with torch.device("meta"):
        hybrid = family.hybrid(config)
    values = base.state_dict() | weights
    stored = {*patch.base_tensors, *weights} - set(patch.removed)  # tied matrices once; two that differ are not tied
    tied = {name: source for name, source in hybrid.all_tied_weights_keys.items() if name not in stored}
    values |= {name: values[source] for name, source in tied.items()}
    state = hybrid.state_dict()
    if wrong := sorted(name for name, tensor in state.items() if name not in values or values[name].shape != tensor.shape):
        raise UserError(f"{folder / WEIGHTS} does not fit {RECORD}: the tensor '{wrong[0]}' is missing or has another shape")
    if strays := sorted(weights.keys() - state.keys()):
        raise UserError(f"{folder / WEIGHTS} holds a tensor that the hybrid has no place for, '{strays[0]}'")
    hybrid.load_state_dict({name: values[name] for name in state}, assign=True)
    buffers = dict(original.named_buffers())
    for name, buffer in list(hybrid.named_buffers()):  # those that no checkpoint holds
        if buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            hybrid.get_submodule(owner).register_buffer(leaf, buffers[name], persistent=False)
    if tied:
        hybrid.tie_weights()
    hybrid.base_sample = sample(base)
    for entry in (each for each in patch.grafts if each.get("kind") == "layer"):
        hybrid.mixer_at(entry["layer"]).replaced = [base.mixer_at(entry["layer"])]
    written = (folder / "generation_config.json").exists()
    hybrid.generation_config = GenerationConfig.from_pretrained(folder) if written else original.generation_config
    for name, parameter in hybrid.named_parameters():
        parameter.requires_grad_(".graft." in name)
    return hybrid.eval()


def unique_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """All tensors that a model's folder holds, by name; tied ones once."""
    named = dict(model.named_parameters())
    saved = model.state_dict()
    return named | {name: buffer for name, buffer in model.named_buffers() if name in saved}


def tensor_digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Name -> "float32 1536x768 sha256", of the description and the bytes."""
    with ThreadPoolExecutor(HASHES) as threads:  # hashing lets other threads run
        return dict(zip(tensors, threads.map(_digest, tensors.values()), strict=True))


def _digest(tensor: Tensor) -> str:
    what = f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape))} "
    total = hashlib.sha256(what.encode())
    total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return what + total.hexdigest()


def _same(first: Tensor, second: Tensor) -> bool:
    """Bit for bit."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if first.data_ptr() == second.data_ptr():
        return True
    return torch.equal(*(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (first, second)))
