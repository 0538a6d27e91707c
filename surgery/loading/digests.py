"""Digests that tell one model, and one tokenizer, from another. They are the same for a live model and when it is reloaded.

A model's digest is that of what it computes: its tensors, grafts included, and its configuration without what says nothing of
the function. So a live hybrid, its exported folder (in one file or in shards), and its patch joined to the base have the same
digest. Adapters count merged, as they are exported. In another dtype it is another model. A base and the same base adopted
have one digest. An export as mamba_ssm, read back by our own classes, has the digest of the hybrid too. An export as nemotron_h
has other tensors, by other names: its record names the digest of the hybrid that it was made from, whose report its card takes;
measured itself, the folder counts as another model.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.families import families
from surgery.kernels.operations import operations
from surgery.models.answers import bytes_of, named_values, scales, settle, tensor_digest
from surgery.models.quantised import exact, is_quantised
from surgery.records.record import OPTIONAL, Record, code_digest, environment

LONGEST_HEADER = 10**8  # bytes of a safetensors file; the library reads no longer one
# Fields of a configuration about files, generation, or the classes around the model; its function does not depend on them.
UNRELATED = frozenset(
    """
    _name_or_path name_or_path transformers_version architectures auto_map dtype torch_dtype bos_token_id eos_token_id
    pad_token_id use_cache return_dict output_hidden_states output_attentions initializer_range
    """.split()
)
# For the families here also: fields that only training from scratch reads, and those that follow from the grafts.
UNRELATED_HERE = UNRELATED | frozenset(
    """
    surgery rescale_prenorm_residual time_step_min time_step_max time_step_floor time_step_scale
    time_step_init_scheme use_mambapy use_associative_scan
    """.split()
)


class Conditions(Record):
    """On what and with what something was measured. Two measurements are of the same thing if all fields agree.

    model, tokenizer: digests. dtype: of the model's tensors; several where they differ. device: "cpu", or a GPU's name.
    kernels: by operation, the backend that serves on this device in this dtype. packages: versions of what computes. code: a
    digest of this toolkit's own source files.
    """

    model: str
    tokenizer: str
    dtype: str
    device: str
    kernels: dict[str, str]
    packages: dict[str, str]
    code: str

    def differs(self, other: "Conditions") -> str | None:
        """The name of the first field that is not the same; None if all are."""
        return next((name for name in type(self).model_fields if getattr(self, name) != getattr(other, name)), None)


def conditions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, digest: str | None = None, words: str | None = None
) -> Conditions:
    """Those of a measurement that begins now, with the kernels that are chosen now. digest, words: the model's and the
    tokenizer's digest, if they are known.

    Raises KernelError if a backend that was asked for cannot serve.
    """
    packages = environment().packages
    used = ("torch", "transformers", *(name for name in (OPTIONAL["bitsandbytes"],) if hasattr(model, "hf_quantizer")))
    kernels = {
        name: operation.choose(*operation.example(model.device, model.dtype)).name
        for name, operation in sorted(operations().items())
        if name != "kl_divergence"  # of tuning
    }
    return Conditions(
        model=digest or model_digest(model),
        tokenizer=words or tokenizer_digest(tokenizer),
        dtype=dtypes(model),
        device=_device(model),
        kernels=kernels,
        packages={name: packages[name] for name in used if name in packages},
        code=code_digest(),
    )


@dataclass(frozen=True)
class Identity:
    """A model's digest and fingerprint, and the digest of every tensor that its folder holds, by name."""

    digest: str
    fingerprint: str
    tensors: dict[str, str]


def identify(model: PreTrainedModel) -> Identity:
    """As model_digest, fingerprint and described say, in one pass over the tensors."""
    digest, base, each = _begun(model), _begun_fingerprint(model), {}
    names = {name for name, _ in model.named_parameters() if ".graft." not in name}
    for name, tensor in _tensors(model):
        _add(digest, name, tensor)
        each[name] = tensor_digest(tensor)
        if name in names:
            _add_to_fingerprint(base, name, tensor, None)
    return Identity(digest.hexdigest(), base.hexdigest(), each)


def model_digest(model: PreTrainedModel) -> str:
    """sha256 of configuration and tensors (names, dtypes, shapes and bytes), tied ones once. A quantised model is settled."""
    total = _begun(model)
    for name, tensor in _tensors(model):
        _add(total, name, tensor)
    return total.hexdigest()


def _begun(model: PreTrainedModel) -> Any:
    settle(model)
    return hashlib.sha256(json.dumps(function_of(model.config), sort_keys=True, default=str).encode())


def _add(total: Any, name: str, tensor: Tensor) -> None:
    total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    total.update(bytes_of(tensor))


def fingerprint(model: PreTrainedModel, dtype: str = "auto") -> str:
    """sha256 over name, dtype, shape and bytes of every base tensor, tied ones once. Grafts do not count: a hybrid has the
    fingerprint of its base. dtype: as load() takes it; the fingerprint is then that of the model loaded so."""
    seen_as, total = named_dtype(dtype), _begun_fingerprint(model)
    names = sorted(name for name, _ in model.named_parameters() if ".graft." not in name)
    for name, parameter in named_values(model, names):
        _add_to_fingerprint(total, name, parameter, seen_as)
    return total.hexdigest()


def _begun_fingerprint(model: PreTrainedModel) -> Any:
    total = hashlib.sha256()
    if is_quantised(model):
        exact(model)
        for name, scale in sorted(scales(model).items()):
            total.update(f"{name} {tensor_digest(scale)} ".encode())
    return total


def _add_to_fingerprint(total: Any, name: str, parameter: Tensor, seen_as: torch.dtype | None) -> None:
    tensor = parameter.detach().cpu()
    tensor = tensor if seen_as is None or not tensor.is_floating_point() else tensor.to(seen_as)
    total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
    total.update(bytes_of(tensor))


def named_dtype(name: str) -> torch.dtype | None:
    """The dtype of a name, as load() takes it; None for "auto": as stored. Raises UserError for another one."""
    dtype = None if name == "auto" else getattr(torch, name, name)
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise UserError(f"dtype must be auto, float32, bfloat16, float16 or float64, not '{name}'")
    return dtype


def dtypes(model: PreTrainedModel) -> str:
    """ "float32", or the dtypes of a model that holds several: "bfloat16, float32"."""
    settle(model)
    return ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of all that decides which tokens a text becomes, and which text tokens become. A chat template does not count."""
    settings = {
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "longest": tokenizer.model_max_length,
        **{name: getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces")},
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Truncation and padding are those of the last call.
        content = {name: part for name, part in json.loads(backend.to_str()).items() if name not in ("truncation", "padding")}
    else:
        content = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab(), "file": _file(tokenizer)}
    return hashlib.sha256(json.dumps([settings, content], sort_keys=True, default=str).encode()).hexdigest()


def _file(tokenizer: Any) -> str | None:
    """A digest of the file that a tokenizer in Python reads (a SentencePiece model)."""
    name = getattr(tokenizer, "vocab_file", None)
    return hashlib.sha256(Path(name).read_bytes()).hexdigest() if name and Path(name).is_file() else None


def function_of(config: Any) -> dict[str, Any]:
    """The fields that the model's function depends on."""
    family = families().get(config.model_type)
    in_stock = family is not None and family.fields is None  # of whose fields transformers' own code may read any
    left = UNRELATED if family is None or in_stock else UNRELATED_HERE
    fields = {name: value for name, value in config.to_dict().items() if name not in left and value is not None}
    if isinstance(quantisation := fields.get("quantization_config"), dict):
        # Which modules are not quantised is seen from their tensors; a hybrid names more of them than its base.
        fields["quantization_config"] = {name: v for name, v in quantisation.items() if name != "llm_int8_skip_modules"}
    if family is not None:
        fields["model_type"] = family.model_type  # an adopted base has the hybrid's
        fields["grafts"] = sorted(fields.get("grafts", ()), key=lambda spec: spec["layer"])
        if in_stock and not fields["grafts"]:
            del fields["grafts"]  # versions up to 0.9 knew no family of such a model
    return fields


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """By name, sorted: what a folder of the model holds, tied parameters once, and also what accelerate has put away."""
    once = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(once)
    for name, tensor in sorted(model.state_dict().items()):
        if name in tied or not isinstance(tensor, Tensor):
            continue
        yield from named_values(model, [name]) if tensor.is_meta else ((name, tensor),)


def _device(model: PreTrainedModel) -> str:
    kinds = {p.device for p in model.parameters() if not p.is_meta} or {model.device}
    return ", ".join(sorted({torch.cuda.get_device_name(kind) if kind.type == "cuda" else kind.type for kind in kinds}))


def file_digest(path: Path) -> str:
    """sha256 of a file; "" for a device or the like, and for a safetensors file that is not as long as its header says: one
    with a terabyte of nothing behind it is not read to its end. Raises OSError."""
    if path.exists() and not path.is_file():
        return ""
    with path.open("rb") as file:
        if path.suffix == ".safetensors" and _declared_size(file) != path.stat().st_size:
            return ""
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _declared_size(file: BinaryIO) -> int | None:
    """Where a safetensors file ends by its own header; None if it has none."""
    try:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length)) if length <= LONGEST_HEADER else {}
        return (
            8 + length + max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None
