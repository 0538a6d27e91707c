"""Adapters of peft on the base, which learn together with the grafts.

peft ignores much without a word. Here a target that matches nothing is an error, and so is a module whose weight is read but
which is never called (Mamba's conv1d, Mamba-1's dt_proj): an adapter there would learn nothing, and merging it would still
change the model. At the end the adapters are merged into copies of the weights, so the base's own weights are never written
to.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from surgery.errors import UserError
from surgery.modeling.graft import is_plain
from surgery.records.recipe import Lora
from surgery.runtime.progress import say

NAME = "default"  # peft's name of the only adapter
PREFIX = "base_model.model."  # of the names in peft's files


def add_adapters(model: Any, options: Lora, seed: int) -> list[str]:
    """Give a model adapters in float32, and return the names of the modules that have one. Other parameters learn, or do not,
    as before. Raises UserError for a target that matches nothing that can be adapted."""
    from peft.tuners.lora import LoraModel

    names = match_targets(model, options)
    learns = {p: p.requires_grad for p in model.parameters()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LoraModel(model, _config(options, names), NAME)
    for parameter, before in learns.items():
        parameter.requires_grad_(before)  # peft has frozen all of them
    own = [p for name, p in model.named_parameters() if ".lora_" in name]
    for parameter in own:
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    say(
        f"adapters: {sum(p.numel() for p in own):,} numbers learn in {len(names)} modules ({', '.join(options.target_modules)})"
    )
    return names


def match_targets(model: Any, options: Lora) -> list[str]:
    """The names of the modules that the targets match, in the model's order. Raises UserError for a target that matches
    nothing, or a module that is no linear module of the base's blocks, is quantised, or is never called."""
    modules: dict[str, Any] = dict(model.named_modules())
    blocks = next(name for name, module in modules.items() if module is model.base_model.layers) + "."
    own = [name for name in modules if name.startswith(blocks) and ".graft" not in name]
    called = _called_modules(model)
    good = {name for name in own if isinstance(modules[name], nn.Linear) and name in called and is_plain(modules[name].weight)}
    choice = f"; there are {', '.join(sorted({name.rpartition('.')[2] for name in good}))}"
    matched: dict[str, str] = {}
    for target in options.target_modules:
        names = [name for name in own if f".{name}".endswith(f".{target}")]
        what = f"tune.lora.target_modules: '{target}'"
        if not names:
            raise UserError(f"{what} matches no module of the base's blocks{choice}")
        for name in names:
            if name not in called:
                raise UserError(
                    f"{what} would learn nothing: the weight of {name} is read, but the module is never called{choice}"
                )
            if name not in good:
                kind = "a quantised module" if isinstance(modules[name], nn.Linear) else f"a {type(modules[name]).__name__}"
                raise UserError(f"{what} matches {name}, {kind}; adapters need a Linear in floating point{choice}")
            if name in matched:
                raise UserError(f"{what} matches {name}, and so does '{matched[name]}'")
            matched[name] = target
    return [name for name in modules if name in matched]


@torch.no_grad()
def _called_modules(model: Any) -> set[str]:
    """The names of the modules that a forward calls."""
    called: set[str] = set()
    handles = [module.register_forward_hook(lambda *_, name=name: called.add(name)) for name, module in model.named_modules()]
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return called


def _config(options: Lora, names: list[str], grafts: list[str] | None = None, base: str | None = None) -> Any:
    """peft's configuration. It names every module in full, so that peft matches exactly what was checked."""
    from peft import LoraConfig

    config = LoraConfig(
        r=options.r,
        target_modules=names,
        lora_alpha=options.lora_alpha,  # type: ignore[arg-type]  # which may be a float
        lora_dropout=options.lora_dropout,
        modules_to_save=grafts,
        base_model_name_or_path=base,
        inference_mode=grafts is not None,
    )
    config.target_modules = sorted(config.target_modules or ())  # a set, whose order is another in every process
    return config


def save_adapters(model: Any, options: Lora, names: list[str], folder: Path) -> None:
    """Write adapters and grafts (modules_to_save) in peft's format, to be put on the untuned hybrid."""
    grafts = [name for name, module in model.named_modules() if name.endswith(".graft")]
    own = (".lora_", *(f"{graft}." for graft in grafts))
    state = {name: p for name, p in model.state_dict().items() if any(part in name for part in own)}
    tensors = {PREFIX + name.replace(f".{NAME}.", "."): p.detach().cpu().contiguous() for name, p in state.items()}
    folder.mkdir(parents=True, exist_ok=True)
    _config(options, names, grafts or None, model.name_or_path).save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def remove_adapters(model: Any, names: list[str]) -> None:
    """Put the adapted modules back as they were."""
    for name in names:
        model.set_submodule(name, model.get_submodule(name).get_base_layer())
    vars(model).pop("peft_config", None)


@torch.no_grad()
def merge_adapters(model: Any, names: list[str]) -> None:
    """Put plain modules with merged weights, copies, in the place of the adapted ones. Raises UserError, the model unchanged,
    where an adapter is not finite."""
    merged = {}
    for name in names:
        layer = model.get_submodule(name)
        base = layer.get_base_layer()
        weight = base.weight + layer.get_delta_weight(NAME).to(base.weight.dtype)
        if not weight.isfinite().all():
            raise UserError(f"the adapter of {name} is not finite; lower tune.learning_rate")
        own = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
        own.weight, own.bias = nn.Parameter(weight, requires_grad=False), base.bias
        merged[name] = own
    for name, module in merged.items():
        model.set_submodule(name, module)
    vars(model).pop("peft_config", None)
