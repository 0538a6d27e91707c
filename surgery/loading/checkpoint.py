"""A base model and its tokenizer out of a folder or the Hub: as transformers has them, or in another layout (readers.py)."""

from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.families import families, family_of
from surgery.loading.hub import local_folder, one_line, why_not_fetched
from surgery.loading.readers import reader_of
from surgery.loading.streamed import mapped
from surgery.models.tokens import prompting
from surgery.records.names import on_hub
from surgery.records.plan import PATCH
from surgery.records.reading import parse_json, shown
from surgery.records.record import read_text

# What a folder that holds a tokenizer holds, some of it at least.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")

MOST_LAYERS = 4096

# A value of `device` that is no device: accelerate's device_map of that name. A recipe's device "auto" is something else.
BALANCED = "balanced"
# And another: weights stay in their files.
DISK = "disk"


def load_base(name: str, revision: str | None = None, device: str = "cpu") -> PreTrainedModel:
    """The model alone, as its folder gives it. device: "cpu" or "disk", as load() takes it. Raises UserError as load() does."""
    folder = local_folder(name, revision)
    if (folder / PATCH).exists():
        raise UserError(f"{name} is a patch; the base of a patch is a whole model")
    try:
        return open_folder(folder, None, device)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"cannot load {name}: {one_line(error)}") from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer that load() finds with a model; no code of its own runs. Raises UserError if there is none."""
    return read_tokenizer(tokenizer_source(local_folder(name)), trust_remote_code=False)


def read_tokenizer(source: str | Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        words = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        if not isinstance(words.model_max_length, int | float):
            raise UserError(f"the tokenizer {source}: model_max_length is {shown(words.model_max_length)}, and no number")
        return prompting(words)
    except UserError:
        raise
    except Exception as error:
        hub = isinstance(source, str) and on_hub(source)
        reason = why_not_fetched(error) if hub else one_line(error)
        raise UserError(f"cannot load the tokenizer {source}: {reason} (another one: --set tokenizer=...)") from error


def open_folder(folder: Path, dtype: torch.dtype | None, device: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model in a folder that holds a whole one. dtype: None for the one that it is stored in. Where no device holds it
    (DISK), or several do (BALANCED), it lies there; else on the CPU. Whatever a damaged file raises is raised."""
    content = content_of(folder / "config.json")
    if (reader := reader_of(content)) is None:
        return _load_transformers(folder, dtype, device, trust_remote_code)
    check_depth(folder / "config.json", content.get(reader.LAYERS))
    model = reader.load_folder(folder, content, dtype)
    return mapped(model, lambda: reader.load_folder(folder, content, dtype).state_dict()) if device == DISK else model


def spread(model: PreTrainedModel, name: str) -> None:
    """Put the layers of a model on all accelerators, as transformers' device_map="balanced" does with one that it loads."""
    if hasattr(model, "hf_device_map"):
        return
    whole = list(model._no_split_modules or [])
    memory = get_balanced_memory(model, no_split_module_classes=whole)
    device_map = infer_auto_device_map(model, memory, no_split_module_classes=whole)
    _refuse_offload(name, device_map)
    dispatch_model(model, device_map)


def brings_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether load(name) gives this tokenizer without being told."""
    try:
        own = AutoTokenizer.from_pretrained(tokenizer_source(local_folder(name)), trust_remote_code=False)
    except Exception:  # there is none (published Llambas), or it cannot be had
        return False
    return own.get_vocab() == tokenizer.get_vocab()


def holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def tokenizer_source(folder: Path) -> Path | str:
    """Where the tokenizer of a model's folder is."""
    if holds_tokenizer(folder):
        return folder
    if (reader := reader_of(content_of(folder / "config.json"))) is not None:
        return reader.TOKENIZER
    raise UserError(f"{folder} holds no tokenizer: say where one is (tokenizer: in a recipe, or --set tokenizer=...)")


def check_depth(what: str | Path, layers: Any) -> None:
    """Raise UserError for more layers than any model has: each would be made before its weights are looked for. what: says so,
    for the message."""
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise UserError(f"{what}: a model of {shown(layers, 20)} layers; at most {MOST_LAYERS:,} are made")


def _load_transformers(folder: Path, dtype: torch.dtype | None, device: str, trust_remote_code: bool) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    check_depth(folder / "config.json", getattr(config, "num_hidden_layers", None))
    if config.model_type in families():  # another one cannot be grafted, but located in, measured, or a donor
        family_of(config).check(config)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype or "auto",
        device_map={BALANCED: BALANCED, DISK: {"": DISK}}.get(device),
        use_safetensors=True,
        output_loading_info=True,
        trust_remote_code=trust_remote_code,
    )
    model, report = loaded  # a pair because of output_loading_info, which transformers' annotations do not know
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            raise UserError(f"cannot load {folder}: {kind.replace('_', ' ')}: {sorted(map(str, report[kind]))[0]}")
    if device != DISK:
        _refuse_offload(str(folder), getattr(model, "hf_device_map", {}))
    return model


def _refuse_offload(name: str, device_map: dict[str, Any]) -> None:
    """accelerate puts on the CPU or the disk what does not fit, and fetches it for each step: too slow to happen unasked.
    Whoever wants it says so to transformers (device_map, offload_folder) and hands over the model."""
    devices = {str(device) for device in device_map.values()}
    if "disk" in devices or ("cpu" in devices and len(devices) > 1):
        raise UserError(
            f"{name} does not fit on the devices of this machine; to run it slowly from the CPU or the disk, load it with "
            "transformers (device_map, offload_folder) and give the model to surgery.splice"
        )


def content_of(path: Path) -> dict:
    """What a config.json holds. Raises UserError where there is none, and for what is none."""
    if not path.exists():
        raise UserError(f"{path.parent} is not a model folder: it holds no config.json")
    content = parse_json(read_text(path), str(path))
    if not isinstance(content, dict):
        raise UserError(f"{path} is no configuration: it holds no keys")
    return content
