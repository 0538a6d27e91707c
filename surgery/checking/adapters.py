"""What LoRA on a list of modules would train: which modules, in how many layers, and whether each adapter reaches the loss.

peft skips names that match nothing without a word. A model may read a module's weight without calling the module (Mamba-1's
dt_proj, fused kernels): an adapter there is never run, and gets no gradient. So peft puts the adapters on, a forward and a
backward are run, and every adapter has to have a gradient. It is done on a small random model of the same architecture, unless
the model is small itself; what the adapters would cover is counted on the whole, without its weights.
"""

import copy
import json
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.checking.shrink import first_of_each_kind, make_model, random_model, shrink
from surgery.errors import UserError

SMALL = 50_000_000  # parameters of a model that is tried itself
LENGTH = 12  # tokens of the text that is tried


@dataclass(frozen=True)
class Coverage:
    """What one target does. modules: how many it matches; layers: in how many of `depth`; share: of all weights, those that get
    an adapter. dead: modules whose adapters get no gradient; bypassed: those of them whose weights are read all the same.
    refused: what peft says, if it refuses the target."""

    target: str
    modules: int
    layers: int
    depth: int
    share: float
    dead: tuple[str, ...] = ()
    bypassed: tuple[str, ...] = ()
    refused: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether something trains nothing."""
        return bool(self.refused or self.dead or not self.modules)

    def __str__(self) -> str:
        if self.refused:
            return f"{self.target}: peft refuses it: {self.refused}"
        if not self.modules:
            return f"{self.target}: matches no module; peft skips it without a word"
        line = f"{self.target}: {self.modules} modules in {self.layers} of {self.depth} layers, {self.share:.1%} of the weights"
        if self.bypassed:
            return f"{line}; {', '.join(self.bypassed)} trains nothing: its weight is read without calling the module"
        return f"{line}; no gradient: {', '.join(self.dead)}" if self.dead else f"{line}; each adapter gets a gradient"


def check_adapters(
    model: PreTrainedModel | PreTrainedConfig, lora: str | Path, trust_remote_code: bool = False
) -> list[Coverage]:
    """What adapters would train. model: a live one, or a configuration alone. lora: names of modules, "in_proj,out_proj", or
    the folder of a peft adapter. Raises UserError for a folder that holds none, or one of another model."""
    config = model if isinstance(model, PreTrainedConfig) else model.config
    options, targets = _read_options(lora)
    if isinstance(model, PreTrainedModel) and sum(p.numel() for p in model.parameters()) <= SMALL:
        whole, tried = model, model
    else:
        with torch.device("meta"):
            whole = make_model(config, trust_remote_code)
        tried = (
            first_of_each_kind(model)
            if isinstance(model, PreTrainedModel)
            else random_model(shrink(config), trust_remote_code=trust_remote_code)
        )
    saved = Path(lora) if (Path(lora) / "adapter_config.json").is_file() else None
    other = f"the adapter in {lora} is one of another model ({options.base_model_name_or_path})"
    if saved is not None and (reason := _misfit(whole, saved, options)):
        raise UserError(f"{other}: {reason}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:  # together, as they are given: some may only be adapted with others
            rows = _rows(targets, *_both(whole, tried, options, targets))
        except ValueError:
            rows = [_alone(target, options, whole, tried) for target in targets]
    if saved is not None and not any(row.modules or row.refused for row in rows):
        raise UserError(f"{other}: no module of this one is called {', '.join(targets)}")
    return rows


def _misfit(model: PreTrainedModel, folder: Path, options: LoraConfig) -> str:
    """Why a saved adapter is none of this model: its base's type, or the first of its weights that fits no module. "" if it may
    be. No weights are read."""
    name, file = options.base_model_name_or_path, folder / "adapter_model.safetensors"
    try:
        described = Path(name or "", "config.json")
        kind = json.loads(described.read_text()).get("model_type") if name and described.is_file() else None
        with safe_open(file, "pt") if file.is_file() else nullcontext() as saved:
            shapes = {name: saved.get_slice(name).get_shape() for name in saved.keys()} if saved else {}  # noqa: SIM118
    except Exception as error:
        raise UserError(f"cannot read the adapter in {folder}, or its base: {str(error).splitlines()[0]}") from error
    if kind is not None and kind.removesuffix("_hybrid") != model.config.model_type.removesuffix("_hybrid"):
        return f"that is a {kind}, and this a {model.config.model_type}"
    modules = dict(model.named_modules())
    for name, shape in shapes.items():
        path, half, _ = re.sub(r"^base_model\.model\.|\.base_layer", "", name).partition(".lora_")
        module = modules.get(path)
        if half and module is None:
            return f"there is no {path} in this one"
        if not isinstance(module, nn.Linear) or not name.endswith(("lora_A.weight", "lora_B.weight")):
            continue
        found, wanted = (shape[1], module.in_features) if name.endswith("A.weight") else (shape[0], module.out_features)
        if found != wanted:
            return f"{path} is {wanted} wide in this one, and {found} in that"
    return ""


def _read_options(lora: str | Path) -> tuple[LoraConfig, list[str]]:
    """The options of the adapters, and the names or the pattern of their modules."""
    if str(lora).strip() and ("/" in str(lora) or Path(lora).is_dir()) and not (Path(lora) / "adapter_config.json").is_file():
        raise UserError(f"{lora} holds no adapter: there is no adapter_config.json")
    if not (Path(lora) / "adapter_config.json").is_file():
        names = list(dict.fromkeys(name.strip() for name in str(lora).split(",") if name.strip()))
        if not names or not all(re.fullmatch(r"[\w.-]+", name) for name in names):
            raise UserError(f"--lora takes names of modules, e.g. in_proj,out_proj, or the folder of an adapter, not '{lora}'")
        return LoraConfig(), names
    try:
        options: Any = PeftConfig.from_pretrained(str(lora))
    except Exception as error:
        raise UserError(f"cannot read the adapter in {lora}: {str(error).splitlines()[0]}") from error
    if not isinstance(options, LoraConfig):
        raise UserError(f"the adapter in {lora} is of the kind {options.peft_type}; only LoRA is checked")
    targets: Any = options.target_modules or []
    return options, [targets] if isinstance(targets, str) else sorted(targets)


def _both(
    whole: PreTrainedModel, tried: PreTrainedModel, options: LoraConfig, targets: list[str]
) -> tuple[nn.Module, nn.Module]:
    """Both with adapters. Where layers are given by number, which the small model may lack, it has the same modules in all."""
    adapted = _with_adapters(whole, options, targets)
    if tried is not whole and (options.layers_to_transform is not None or any(re.search(r"\d", each) for each in targets)):
        options = copy.deepcopy(options)
        options.layers_to_transform = options.layers_pattern = None
        targets = sorted({re.sub(r"^.*?\.\d+\.", "", name) for name in _adapted(adapted)})
    return adapted, _with_adapters(tried, options, targets)


def _with_adapters(model: PreTrainedModel, options: LoraConfig, targets: list[str]) -> nn.Module:
    """A copy with adapters, of which no half begins at zero. Raises ValueError where peft refuses them."""
    options = copy.deepcopy(options)
    whole = len(targets) == 1 and (targets[0] == "all-linear" or not re.fullmatch(r"[\w.-]+", targets[0]))
    options.target_modules = targets[0] if whole else list(targets)
    options.modules_to_save, options.init_lora_weights = None, False
    options.r, options.rank_pattern, options.lora_dropout = 2, {}, 0.0
    return inject_adapter_in_model(options, copy.deepcopy(model))


def _alone(target: str, options: LoraConfig, whole: PreTrainedModel, tried: PreTrainedModel) -> Coverage:
    try:
        (row,) = _rows([target], *_both(whole, tried, options, [target]))
    except ValueError as error:
        line = " ".join(str(error).split())
        missing = "not found" in line or "No modules" in line
        return Coverage(target, 0, 0, _depth(whole), 0.0, refused="" if missing else line[:200])
    return row


def _rows(targets: list[str], whole: Any, tried: Any) -> list[Coverage]:
    """One of each target. whole: has all modules; tried: is run."""
    without = _without_gradient(tried)
    named = [name for name in targets if any(_matches(each, name) for each in _adapted(whole))]
    rest = [name for name in targets if name not in named]
    other = [name for name in _adapted(whole) if not any(_matches(name, target) for target in named)]
    rows = [_row(target, whole, without, partial(_matches, target=target)) for target in named]
    if not other:
        return rows + [Coverage(target, 0, 0, _depth(whole), 0.0) for target in rest]
    # A pattern, or names that peft takes for other modules: experts whose weights are one parameter.
    found = f"{','.join(rest) or 'target_parameters'} ({', '.join(_short(other))})"
    return [*rows, _row(found, whole, without, lambda name: not any(_matches(name, target) for target in named))]


def _row(target: str, whole: Any, without: dict[str, bool], belongs: Callable[[str], bool]) -> Coverage:
    total = sum(p.numel() for name, p in whole.named_parameters() if "lora_" not in name)
    matched = {name: module for name, module in _adapted(whole).items() if belongs(name)}
    layers = {found[1] for name in matched if (found := re.search(r"\.(\d+)\.", name))}
    own = {id(p): p.numel() for module in matched.values() for p in module.get_base_layer().parameters()}  # wrappers nest
    dead = [name for name in without if {*_short([name])} <= {*_short([*matched])}]
    bypassed = [name for name in dead if without[name]]
    return Coverage(target, len(matched), len(layers), _depth(whole), sum(own.values()) / total, _short(dead), _short(bypassed))


def _short(names: list[str]) -> tuple[str, ...]:
    """Names of modules without the numbers of their layers."""
    return tuple(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names}))


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _depth(model: Any) -> int:
    return int(getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0))


def _adapted(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _without_gradient(model: Any) -> dict[str, bool]:
    """Modules whose adapters get no gradient -> whether their own weights get one all the same."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    words = min(int(model.config.get_text_config(decoder=True).vocab_size), 1000)
    ids = torch.randint(min(3, words - 1), words, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    model.train()
    with torch.enable_grad():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    dead = {}
    for name, module in _adapted(model).items():
        own = [p for part, p in module.named_parameters() if "lora_" in part]
        if not own or any(p.grad is None or not p.grad.any() for p in own):
            weight = module.get_base_layer().weight.grad
            dead[name] = weight is not None and bool(weight.any())
    return dead
