"""load: a base or a hybrid, with its tokenizer, from a folder or the Hub.

A folder may be one of transformers', with a base or with a hybrid of ours; an original one of state-spaces (original.py); or a
patch, which is joined to its base. A base of a family here is returned as its hybrid class with no grafts, so that base and
hybrid run the same kernels. Weights are read from safetensors, or from pickles that hold nothing but tensors, and no code of a
folder runs unless the caller allows it. Everything that keeps a model from being loaded exactly is a UserError in one line.
"""

import json
import os
import platform
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from surgery.errors import UserError, did_you_mean
from surgery.modeling.graft import what_went
from surgery.models import original
from surgery.runtime.files import read_text
from surgery.runtime.progress import say
from surgery.splicing.splice import adopt, sample

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
PATCH = "patch.json"
MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
# What is fetched of a repository on the Hub, and what is not: the same weights once more in their maker's layout.
FETCHED = ["*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja", "*.py", "README.md"]
NOT_FETCHED = ["consolidated*", "original/*"]
READ = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")
OF_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")  # others are code of the Hub
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")  # as configurations name their number
MOST_LAYERS = 4096  # each is made before its weights are looked for
# Processor flags, by dtype, of instructions that compute in it.
NATIVE = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp", "fphp"},
}


class Checkpoint(NamedTuple):
    """A model in eval mode, and its tokenizer."""

    model: Any
    tokenizer: Any


def load(
    name: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    *,
    tokenizer: str | None = None,
    revision: str | None = None,
) -> Checkpoint:
    """Load a base or a hybrid.

    name: a Hub id, or a folder. dtype: a name of torch's; "stored", as the files have it; or "auto", the same, but float32 on a
    processor that has no instructions for 16 bits, where float32 is faster. device: a device of torch's; or "auto", a GPU if
    there is one, with those layers elsewhere that do not fit (accelerate's device_map). trust_remote_code: let code from the
    folder run. tokenizer: another place to take it from. revision: of the repository on the Hub.

    Raises UserError in one line for anything that cannot be loaded exactly.
    """
    check_device(device)
    if dtype not in ("auto", "stored", *DTYPES):
        raise UserError(f"dtype must be auto, stored, {', '.join(DTYPES)}, not '{dtype}'")
    folder = find_folder(name, revision)
    target = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    words: Any = None
    try:
        if (folder / PATCH).is_file():
            from surgery.exporting.patch import join_patch  # which imports this module

            model, words = join_patch(folder, device=device)
        else:
            model = open_folder(folder, DTYPES.get(dtype), target, device == "auto", trust_remote_code)
        model = model.eval()
        wanted = choose_dtype(dtype, model.dtype, target)
        if wanted != model.dtype and not hasattr(model, "hf_quantizer"):
            model = as_dtype(model, wanted)
        if not hasattr(model, "hf_quantizer") and not hasattr(model, "hf_device_map"):
            model = model.to(target)
        if model.dtype == torch.float64 and getattr(model, "_can_set_experts_implementation", bool)():
            model.set_experts_implementation("eager")  # the others know no float64
    except UserError:
        raise
    except Exception as error:  # whatever a damaged file raises
        raise UserError(f"cannot load {name}: {one_line(error)}") from error
    if broken := broken_weight(model):
        raise UserError(f"cannot use {name}: {broken}")
    if words is None or tokenizer is not None:
        place: str | Path = tokenizer or folder
        if tokenizer is None and not any((folder / each).exists() for each in OF_TOKENIZERS):
            if not original.is_original(read_content(folder)):
                raise UserError(
                    f"{folder} holds no tokenizer; copy that of its base into it, or let a recipe name one (tokenizer)"
                )
            place = original.TOKENIZER
        words = read_tokenizer(place, trust_remote_code)
    known, rows = words.vocab_size, model.get_input_embeddings().weight.shape[0]  # without tokens that were added later
    if known > rows:
        raise UserError(f"cannot use {name}: the tokenizer has {known:,} tokens and the model {rows:,}; is it another model's?")
    if len(words) > rows:
        say(f"{name}: {len(words) - rows:,} tokens were added and have no embedding; resize the model's before text holds them")
    return Checkpoint(model, words)


def as_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The model in another dtype, as from_pretrained reads it: what no folder holds, like the frequencies of rotary embeddings,
    keeps its own."""
    held = model.state_dict()
    kept = {name: buffer for name, buffer in model.named_buffers() if name not in held}
    model = model.to(dtype)
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    return model


def open_folder(folder: Path, dtype: torch.dtype | None, device: str, spread: bool, trust_remote_code: bool) -> Any:
    """The model in a folder that holds a whole one, adopted. dtype: None for the stored one. spread: over all devices, if this
    one is a GPU and too small."""
    content = read_content(folder)
    if original.is_original(content):
        model = original.read(folder, content, dtype)
    else:
        config = read_config(folder, trust_remote_code)
        whole = not spread or not device.startswith("cuda") or fits(folder, config, dtype)
        device_map = None if not device.startswith("cuda") else {"": device} if whole else "auto"
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype or "auto",
            device_map=device_map,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
            trust_remote_code=trust_remote_code,
        )
        model, report = loaded
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if report.get(kind):
                raise UserError(f"cannot load {folder}: {kind.replace('_', ' ')}: {sorted(map(str, report[kind]))[0]}")
        if whole and hasattr(model, "hf_device_map"):
            del model.hf_device_map  # it is in one piece, and may be moved
    model = adopt(model)
    grafts = getattr(model.config, "grafts", None) or []
    if any(not entry.get("of_base") for entry in grafts):  # the base of a hybrid is frozen
        own = set(model.graft_parameters())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in own)
        model.base_sample = {name: each for name, each in sample(model).items() if name not in own}
    return model


def find_folder(name: str | Path, revision: str | None = None) -> Path:
    """The local folder of a model: itself, or a snapshot of its repository on the Hub. Raises UserError if there is none, and
    for a file in it that cannot belong to a model."""
    if not isinstance(name, str | Path):
        raise UserError(f"load takes a Hub id or a folder, not a {type(name).__name__}")
    path, text = Path(name), str(name)
    try:
        if path.is_dir():
            check_files(path)
            return path
        if path.exists():
            why = "GGUF files are for llama.cpp; load the model that it was made of"
            raise UserError(f"{name} is a file; {why if path.suffix == '.gguf' else 'give the folder of the model'}")
        hint = did_you_mean(path.name, (each.name for each in path.parent.glob("*/")), path.parent)
        if not MODEL_ID.fullmatch(text) or path.suffix in (".yaml", ".yml", ".json"):
            raise UserError(f"no such folder: {name}{hint}")
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}") from error
    from huggingface_hub import snapshot_download

    try:
        snapshot = snapshot_download(text, revision=revision, allow_patterns=FETCHED, ignore_patterns=NOT_FETCHED)
    except Exception as error:
        raise UserError(f"no such folder: {name}{hint}, and {why_not_fetched(error)}") from error
    check_files(Path(snapshot))
    return Path(snapshot)


def check_files(folder: Path) -> None:
    """Raise UserError for a file that cannot be read or be a model's: a pipe would be waited for, a device has no end, an index
    must not lead out of the folder, and an adapter is no model."""
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder} is an adapter: load its base, and put it on with peft.PeftModel.from_pretrained(model, FOLDER)"
        )
    for path in sorted(folder.iterdir()):
        if path.suffix in READ and path.exists() and not path.is_dir() and not path.is_file():
            raise UserError(f"{path} is not a plain file")
        if path.suffix in READ and path.exists() and not os.access(path, os.R_OK):
            raise UserError(f"cannot read {path}: permission denied")
        whole = path.with_name(path.name.removesuffix(".index.json"))  # shards that it has replaced may have left their index
        if path.name.endswith((".safetensors.index.json", ".bin.index.json")) and not whole.exists():
            original.read_index(path)


def read_content(folder: Path) -> dict[str, Any]:
    """What a folder's config.json holds. Raises UserError where there is none."""
    path = folder / "config.json"
    if not path.exists():
        gguf = "; GGUF files are for llama.cpp" if any(folder.glob("*.gguf")) else ""
        raise UserError(f"{folder} is not the folder of a model: it holds no config.json{gguf}")
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no configuration: it holds no keys")
    return content


def read_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The configuration of a folder of transformers'. Raises UserError for what is no model's, for a type that transformers
    does not know, and for grafts that went with version 0.30."""
    path, content = folder / "config.json", read_content(folder)
    parts = [part for part in (content, content.get("text_config")) if isinstance(part, dict)]
    for count in (part.get(name) for part in parts for name in LAYERS):  # a configuration alone makes lists of this length
        if isinstance(count, int | float) and count > MOST_LAYERS:
            raise UserError(f"{path}: a model of {count:,} layers; at most {MOST_LAYERS:,} are made")
    if original.is_original(content):
        return original.make_config(content)
    kind = content.get("model_type")
    if not isinstance(kind, str):
        raise UserError(f"{path} names no model_type, so it does not describe a model")
    if kind not in CONFIG_MAPPING and not ("auto_map" in content and trust_remote_code):
        own = "; code in its folder may, and runs only with --trust-remote-code" if "auto_map" in content else ""
        raise UserError(f"transformers {transformers.__version__} knows no model of the type '{kind[:40]}'{own}")
    attention = content.get("attn_implementation", content.get("_attn_implementation"))
    if attention not in (None, *ATTENTION):
        raise UserError(f"{path}: attn_implementation is {str(attention)[:40]!r}; take one of {', '.join(ATTENTION)}")
    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a wrong value raises
        raise UserError(f"cannot read {path}: {one_line(error)}") from error
    config.return_dict = True
    text = config.get_text_config(decoder=True)
    for name in ("hidden_size", "vocab_size", "chunk_size", "mamba_chunk_size"):
        if not isinstance(getattr(text, name, 1), int) or getattr(text, name, 1) < 1:
            raise UserError(f"{path}: {name} is {getattr(text, name)!r}; it has to be a whole number from 1 on")
    check_grafts(path, getattr(config, "grafts", None) or [], getattr(text, "num_hidden_layers", None))
    return config


def check_grafts(path: Path, grafts: Any, layers: Any) -> None:
    """Raise UserError for entries that are no grafts, or that only versions up to 0.30 had."""
    if not isinstance(grafts, list) or not all(isinstance(entry, dict) and type(entry.get("layer")) is int for entry in grafts):
        raise UserError(f"{path}: grafts has to be a list of grafts, each with its layer")
    for entry in grafts:
        layer = entry["layer"]
        if gone := what_went(entry):
            raise UserError(f"{path}: layer {layer} has {gone}; 0.30.0 was the last version that had it")
        if not 0 <= layer < layers:
            raise UserError(f"{path}: a graft is in layer {layer}, and there are {layers} layers")
        if not isinstance(below := entry.get("closed_below", 0.0), int | float) or not 0 <= below < 1:
            raise UserError(f"{path}: closed_below of layer {layer} is {below!r}; it has to be a number from 0 to below 1")


def read_tokenizer(place: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a folder or on the Hub. Raises UserError in one line if there is none that works."""
    try:
        words = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
        if not isinstance(words.model_max_length, int | float):
            raise UserError(f"the tokenizer {place}: model_max_length is {str(words.model_max_length)[:40]!r}, and no number")
        words("a 1")
        return words
    except UserError:
        raise
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = one_line(error) if Path(place).is_dir() else why_not_fetched(error)
        raise UserError(f"cannot load the tokenizer {place}: {why} (name another one: tokenizer=...)") from error


def check_device(name: str) -> None:
    """Raise UserError for a name that is no device, and for a device that is not here."""
    if name == "auto":
        return
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device must be auto, cpu, cuda, cuda:1 or mps, not '{name}'") from None
    here = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= here.get(device.type, 0):
        raise UserError(f"device is '{name}', which this machine does not have; set device=cpu, or leave it at auto")


def choose_dtype(asked: str, stored: torch.dtype, device: str) -> torch.dtype:
    """The dtype in which a model that is stored in another one computes. asked: a recipe's dtype; auto is float32 on a
    processor without instructions for the stored one."""
    if asked != "auto":
        return DTYPES.get(asked, stored)
    if not device.startswith("cpu") or stored not in NATIVE or NATIVE[stored] & processor_flags():
        return stored
    say_slow(stored)
    return torch.float32


@cache
def say_slow(stored: torch.dtype) -> None:
    """Say once why a model is in float32."""
    name = str(stored).removeprefix("torch.")
    say(f"this processor has no {name} instructions: the model computes in float32 (dtype={name} keeps what is stored)")


@cache
def processor_flags() -> frozenset[str]:
    """What the processor says that it can do. Apple's says nothing there, and has float16."""
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return frozenset({"fphp"})
    info = Path("/proc/cpuinfo")
    return frozenset(info.read_text().split() if info.is_file() else ())


def fits(folder: Path, config: Any, dtype: torch.dtype | None) -> bool:
    """Whether a model's weights fill at most four fifths of what is free on the GPU."""
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors")) or sum(
        path.stat().st_size for path in folder.glob("*.bin")
    )
    own = getattr(config, "dtype", None) or torch.float32
    return stored * (dtype or own).itemsize / own.itemsize < 0.8 * torch.cuda.mem_get_info()[0]


def broken_weight(model: Any) -> str:
    """Which weight holds a NaN or an infinity, in words, or ""."""
    for name, weight in model.named_parameters():
        if weight.is_meta or not weight.is_floating_point() or weight.element_size() == 1 or not weight.numel():
            continue
        least, most = weight.detach().aminmax()
        if not (least.isfinite() and most.isfinite()):
            return f"the weight '{name}' holds {'a NaN' if most.isnan() else 'an infinity'}"
    return ""


def why_not_fetched(error: BaseException) -> str:
    """What keeps something from being fetched from the Hub, in words that say what to do."""
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    if is_offline_mode():
        return "the Hub may not be asked (HF_HUB_OFFLINE is set) and its cache here does not hold it"
    if isinstance(error, GatedRepoError):
        return "the Hub gives it only to those who accepted its terms: do that on its page, then `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "the Hub has no such repository, or it is private (`hf auth login`)"
    if isinstance(error, RevisionNotFoundError):
        return "its repository on the Hub has no such revision"
    if isinstance(error, LocalEntryNotFoundError | ConnectionError) or "couldn't connect" in str(error):
        return "the Hub cannot be reached and its cache here does not hold it; is there a network?"
    return one_line(error)


def one_line(error: BaseException) -> str:
    """An exception's type and the first line of its message, and the next one where the first ends with a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or ["no message"]
    return f"{type(error).__name__}: {' '.join(lines[: 2 if lines[0].endswith(':') else 1])}"
