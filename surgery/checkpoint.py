"""Loading models (Hub ids, folders, original state-spaces folders) and telling them apart by fingerprint."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.families import family_of
from surgery.original import is_original, load_original

# The tokenizer of the state-spaces models, which their folders do not hold.
ORIGINAL_TOKENIZER = "EleutherAI/gpt-neox-20b"


@dataclass
class Checkpoint:
    """A model in eval mode, its tokenizer, and what identifies it."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str


def load(
    name: str | Path,
    *,
    tokenizer: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Load a base or a hybrid.

    name: a Hub id, a Hugging Face folder, or an original state-spaces folder. tokenizer: where to take the tokenizer from if
    not from the same place. dtype: "auto" (as stored) or a torch name. Weights are read from safetensors, or from pickles that
    hold nothing but tensors. Raises UserError in one line for anything that cannot be loaded exactly.
    """
    name = str(name)
    folder = _folder(name)
    config = _json(folder / "config.json")
    try:
        if is_original(config):
            model: PreTrainedModel = load_original(folder, config)
            if dtype != "auto":
                model = model.to(getattr(torch, dtype))
            tokenizer = tokenizer or (None if (folder / "tokenizer.json").exists() else ORIGINAL_TOKENIZER)
        else:
            model = _load_transformers(folder, dtype, trust_remote_code)
        words = AutoTokenizer.from_pretrained(tokenizer or folder, trust_remote_code=trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # whatever a damaged file raises, the user gets one line
        raise UserError(f"cannot load {name}: {_one_line(error)}") from error
    return Checkpoint(name, model.eval().to(device), words, fingerprint(model))


def _load_transformers(folder: Path, dtype: str, trust_remote_code: bool) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    family_of(config).check(config)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
        trust_remote_code=trust_remote_code,
    )
    model, report = loaded  # a pair because of output_loading_info, which transformers' annotations do not know
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            raise UserError(f"cannot load {folder}: {kind.replace('_', ' ')}: {sorted(map(str, report[kind]))[0]}")
    return model


def fingerprint(model: PreTrainedModel) -> str:
    """sha256 over name, dtype, shape and bytes of every base tensor, tied ones once. Grafts do not count: a hybrid has the
    fingerprint of its base."""
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if ".graft." in name:
            continue
        tensor = parameter.detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _folder(name: str) -> Path:
    """The local folder of a model: itself, or the Hub's snapshot."""
    if Path(name).is_dir():
        return Path(name)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1 or Path(name.split("/", maxsplit=1)[0]).is_dir()
    if looks_local:
        raise UserError(f"no such folder: {name}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.py"]))
    except Exception as error:
        raise UserError(f"no such folder, and not to be had from the Hub: {name} ({_one_line(error)})") from error


def _json(path: Path) -> dict:
    if not path.exists():
        raise UserError(f"{path.parent} is not a model folder: it holds no config.json")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
