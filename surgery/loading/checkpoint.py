"""Loading models (Hub ids, folders, original state-spaces folders, patches) and telling them apart by fingerprint."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.families import families, family_of
from surgery.loading.devices import check_device, same_device
from surgery.loading.digests import fingerprint, named_dtype
from surgery.loading.hub import local_folder, one_line, why_not_fetched
from surgery.loading.opened import Checkpoint, a_type, model_of
from surgery.loading.original import is_original, load_original
from surgery.loading.sharing import is_all_in, share_equal, shareable
from surgery.models.quantised import converted
from surgery.models.streamed import mapped
from surgery.models.tokens import prompting
from surgery.records.names import on_hub
from surgery.records.plan import Plan
from surgery.records.reading import parse_json, shown
from surgery.records.record import read_text
from surgery.splicing.joining import RECORD, Patch, join
from surgery.splicing.remembered import PLAN, Opened, Surgery, read_surgery, remember
from surgery.splicing.splice import freeze

# The tokenizer of the state-spaces models, which their folders do not hold.
ORIGINAL_TOKENIZER = "EleutherAI/gpt-neox-20b"

# What a folder that holds a tokenizer holds, some of it at least.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")

MOST_LAYERS = 4096

# A value of `device` that is no device: accelerate's device_map of that name. A recipe's device "auto" is something else.
BALANCED = "balanced"
# And another: weights stay in their files.
DISK = "disk"


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
        raise UserError(f"surgery.load takes a Hub id or a folder, not {a_type(name)}")
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
        if (folder / RECORD).exists():
            model, tokenizer_folder = _load_patch(name, folder, base, other, torch_dtype, device)
            tokenizer_folder = folder if _holds_tokenizer(folder) else tokenizer_folder
            model = model if torch_dtype is None else converted(model, torch_dtype, name)
        elif base is not None:
            raise UserError(f"{name} is not a patch, and takes no base")
        elif is_original(config := content_of(folder / "config.json")):
            model, tokenizer_folder = _load_original(folder, config, torch_dtype, device), folder
        else:
            model, tokenizer_folder = _load_transformers(folder, torch_dtype, device, trust_remote_code), folder
        if other is not None:
            share_equal(model, other, folder)
        if device == BALANCED and not hasattr(model, "hf_device_map"):
            dispatch_model(model, _device_map(name, model))
        words = _read_tokenizer(tokenizer or _tokenizer(tokenizer_folder), trust_remote_code)
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
    if (folder / RECORD).exists():
        return replace(model.surgery, tokenizer=tokenizer)
    return read_surgery(folder, tokenizer) if (folder / PLAN).exists() else None


def load_base(name: str, revision: str | None = None, device: str = "cpu") -> PreTrainedModel:
    """The model alone, as its folder gives it. device: "cpu" or "disk", as load() takes it. Raises UserError as load() does."""
    folder = local_folder(name, revision)
    if (folder / RECORD).exists():
        raise UserError(f"{name} is a patch; the base of a patch is a whole model")
    try:
        if is_original(config := content_of(folder / "config.json")):
            return _load_original(folder, config, None, device)
        return _load_transformers(folder, None, device, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"cannot load {name}: {one_line(error)}") from error


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that load() finds with a model. Raises UserError if there is none."""
    return _read_tokenizer(_tokenizer(local_folder(name)), trust_remote_code)


def _read_tokenizer(source: str | Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
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


def plan_of(folder: str | Path) -> Plan:
    """The plan of a hybrid's folder or patch. Raises UserError if it holds none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}; a hybrid is a folder that `surgery splice`, `tune` or `export` wrote")
    if (folder / RECORD).exists():
        return Patch.read(folder / RECORD).plan
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
    patch = Patch.read(folder / RECORD)
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


def _load_original(folder: Path, config: dict[str, Any], dtype: torch.dtype | None, device: str) -> PreTrainedModel:
    _check_depth(folder, config.get("n_layer"))
    model = load_original(folder, config, dtype)
    return mapped(model, lambda: load_original(folder, config, dtype).state_dict()) if device == DISK else model


def brings_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether load(name) gives this tokenizer without being told."""
    try:
        own = AutoTokenizer.from_pretrained(_tokenizer(local_folder(name)), trust_remote_code=False)
    except Exception:  # there is none (published Llambas), or it cannot be had
        return False
    return own.get_vocab() == tokenizer.get_vocab()


def _holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def _tokenizer(folder: Path) -> Path | str:
    """Where the tokenizer of a model's folder is."""
    if _holds_tokenizer(folder):
        return folder
    if is_original(content_of(folder / "config.json")):
        return ORIGINAL_TOKENIZER
    raise UserError(f"{folder} holds no tokenizer: say where one is (tokenizer: in a recipe, or --set tokenizer=...)")


def _check_depth(folder: Path, layers: Any) -> None:
    """Raise UserError for more layers than any model has: each would be made before its weights are looked for."""
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise UserError(f"{folder / 'config.json'}: a model of {shown(layers, 20)} layers; at most {MOST_LAYERS:,} are made")


def _load_transformers(folder: Path, dtype: torch.dtype | None, device: str, trust_remote_code: bool) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    _check_depth(folder, getattr(config, "num_hidden_layers", None))
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


def _device_map(name: str, model: PreTrainedModel) -> dict[str, Any]:
    """What transformers' device_map="balanced" would be, for a model that it did not load."""
    whole = list(model._no_split_modules or [])
    memory = get_balanced_memory(model, no_split_module_classes=whole)
    device_map = infer_auto_device_map(model, memory, no_split_module_classes=whole)
    _refuse_offload(name, device_map)
    return device_map


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
