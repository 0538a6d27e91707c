"""LoRA and its relatives: adapters of peft on the base, beside the grafts, while a model is tuned.

peft ignores much without a word. Here a target that matches nothing is an error. So is a module whose weight is read but which
is never called (Mamba's conv1d, Mamba-1's dt_proj): an adapter would learn nothing there, and merging it would still change the
model. Grafts are trained whole. A table says what was adapted.

At the end the adapters are merged into copies of the weights. The weights themselves belong to the base as well, which is the
teacher, so nothing ever writes to them.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.hybrids.patching import hooked, note_of, set_note
from surgery.models.quantised import has_quantised_weight
from surgery.records.recipe import Lora
from surgery.records.record import write_text
from surgery.runtime.ownership.complaints import reason
from surgery.runtime.ownership.files import check_ours
from surgery.runtime.ownership.replacing import building
from surgery.runtime.processes import is_main
from surgery.runtime.progress import say
from surgery.splicing.splice import added, graft_parameters

if TYPE_CHECKING:
    from peft import LoraConfig  # it takes a second to import, and runs without adapters need none of it

NAME = "default"  # peft's name of the only adapter
PREFIX = "base_model.model."  # of the names in peft's files
FOLDER, WEIGHTS, TABLE = "adapter", "adapter_model.safetensors", "lora.txt"


@dataclass(frozen=True)
class Match:
    """A module that a target matches, and the rank of its adapter."""

    target: str
    module: str
    rank: int


@contextmanager
def adapted(model: PreTrainedModel, options: Lora | None, *, seed: int = 0, out: Path | None = None) -> Iterator[None]:
    """Give `model` adapters for a while: parameters in float32 or wider, with `.lora_` in their names. At the end they are
    merged, and unsplice still restores the base. If an error is raised meanwhile, the model is put back as it was. Without
    options nothing happens.

    out: a folder for the table of what was adapted, and at the end for adapter/, which holds adapters and grafts in peft's
    format, to be put on the untuned hybrid. Raises UserError for a target that matches nothing that can be adapted.
    """
    if options is None:
        yield
        return
    from peft.tuners.lora import LoraModel

    if out is not None and is_main():
        check_ours(out / TABLE, out / FOLDER)
    matched = matches(model, options)
    config = _config(options, matched)
    requires_grad = {p: p.requires_grad for p in model.parameters()}
    plain = {match.module: model.get_submodule(match.module) for match in matched}
    layers: dict[str, Any] = {}
    try:
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                LoraModel(model, config, NAME)
        finally:
            for p, before in requires_grad.items():
                p.requires_grad_(before)  # peft has frozen all of them
        layers |= {match.module: model.get_submodule(match.module) for match in matched}
        for p in adapters(model).values():
            p.data = p.data.to(torch.promote_types(p.dtype, torch.float32))
        lines = table(model, matched)
        for line in lines:
            say(line)
        yield
        if out is not None and is_main():
            write_text(out / TABLE, "\n".join(lines) + "\n")
            _save(model, config, out)
        own = _merge(layers)
        # The first weights count: a second tuning adapts what the first one has merged.
        set_note(model, "unadapted", own | note_of(model, "unadapted", {}))
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer.get_base_layer())
        for name, module in plain.items() if not layers else ():  # peft failed on the way
            model.set_submodule(name, module)
        vars(model).pop("peft_config", None)


def adapters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters of adapters, by name."""
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}


def matches(model: PreTrainedModel, options: Lora) -> list[Match]:
    """The modules that the targets match, in the model's order. Raises UserError for a target that matches nothing, or a module
    that is not a linear module of the base's blocks, is quantised, or is never called."""
    targets = (
        options.target_modules if isinstance(options.target_modules, dict) else dict.fromkeys(options.target_modules, options.r)
    )
    modules: dict[str, Any] = dict(model.named_modules())
    blocks = next(name for name, module in modules.items() if module is model.base_model.layers) + "."
    in_use, is_added = _modules_called(model), added(model)
    adaptable = [
        name
        for name, module in modules.items()
        if name.startswith(blocks) and not is_added(name) and isinstance(module, nn.Linear) and name in in_use
    ]
    matched: dict[str, Match] = {}
    for target, rank in targets.items():
        named = [name for name in modules if f".{name}".endswith(f".{target}")]
        own = [name for name in named if name.startswith(blocks) and not is_added(name)]
        refused = f"tune.lora.target_modules: '{target}'"
        choice = f"; there are {', '.join(sorted({name.rpartition('.')[2] for name in adaptable}))}"
        if not named:
            raise UserError(f"{refused} matches no module{choice}")
        if not own:
            where = "is only in grafts, which are trained whole" if is_added(named[0]) else "is outside the blocks"
            raise UserError(f"{refused} {where}{choice}")
        for name in own:
            if name not in in_use:
                raise UserError(
                    f"{refused} would learn nothing: the model reads the weight of {name} but never calls it{choice}"
                )
            if name not in adaptable:
                raise UserError(f"{refused} matches {name}, a {type(modules[name]).__name__}; adapters need a Linear{choice}")
            if has_quantised_weight(modules[name]):
                raise UserError(
                    f"{refused} matches {name}, which is quantised, so the adapter could not be merged; leave out tune.lora, "
                    "or use a base that is not quantised"
                )
            if name in matched:
                raise UserError(f"{refused} matches {name}, and so does '{matched[name].target}'")
            matched[name] = Match(target, name, rank)
    return [matched[name] for name in modules if name in matched]


def table(model: PreTrainedModel, matched: list[Match]) -> list[str]:
    """The lines of a table: what each target matched in an adapted model, and how many numbers are trained there."""
    groups: dict[tuple[str, ...], dict[str, int]] = {}
    for match in matched:
        layer: Any = model.get_submodule(match.module)
        shape = " x ".join(map(str, layer.weight.shape))
        alike = (match.target, re.sub(r"\.\d+\.", ".*.", match.module), shape, str(match.rank))
        count = sum(p.numel() for name, p in layer.named_parameters() if name.startswith("lora_"))
        groups.setdefault(alike, {})[match.module] = count
    total = sum(sum(counts.values()) for counts in groups.values())
    rows = [("target", "matched", "modules", "weight", "rank", "trainable")]
    for (target, where, shape, rank), counts in groups.items():
        pattern = where if len(counts) > 1 else next(iter(counts))
        rows.append((target, pattern, str(len(counts)), shape, rank, f"{sum(counts.values()):,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"lora: {total:,} trainable numbers in {len(matched)} modules", *lines]


def _modules_called(model: PreTrainedModel) -> set[str]:
    """The names of the modules that a forward calls."""
    in_use: set[str] = set()
    modules = model.named_modules()
    with hooked(lambda: [m.register_forward_hook(lambda *_, name=name: in_use.add(name)) for name, m in modules]):
        model.base_model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    return in_use


def _config(options: Lora, matched: list[Match]) -> "LoraConfig":
    """peft's configuration. It names every module in full, so that peft matches exactly what was checked."""
    from peft import LoraConfig

    return LoraConfig(
        r=options.r,
        target_modules=[match.module for match in matched],
        rank_pattern={match.module: match.rank for match in matched if match.rank != options.r},
        lora_alpha=options.lora_alpha,  # type: ignore[arg-type]  # which may also be a float
        lora_dropout=options.lora_dropout,
    )


def _merge(layers: dict[str, Any]) -> dict[str, nn.Parameter]:
    """Add the adapters to copies of the weights. Returns the weights themselves, by their names in the model without
    adapters."""
    bases = {name: layer.get_base_layer() for name, layer in layers.items()}
    own = {name: base.weight for name, base in bases.items()}
    try:
        for name, layer in layers.items():
            # safe_merge gives the parameter a new tensor, so a parameter of its own is all that it needs.
            bases[name].weight = nn.Parameter(own[name].detach(), own[name].requires_grad)
            layer.merge(safe_merge=True)
    except ValueError as error:
        for name, base in bases.items():
            base.weight = own[name]
        raise UserError("the adapters are not finite and were not merged; lower tune.learning_rate") from error
    return {f"{name}.weight": weight for name, weight in own.items()}


def _save(model: PreTrainedModel, config: "LoraConfig", out: Path) -> None:
    """Write adapter/: adapter_config.json and adapter_model.safetensors."""
    from peft import LoraConfig, get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False) | graft_parameters(model)
    grafts = [name for name, _ in model.named_modules() if name.endswith(".graft")]
    whole = LoraConfig(
        **config.to_dict() | {"modules_to_save": grafts, "base_model_name_or_path": model.name_or_path, "inference_mode": True}
    )
    # peft holds them as a set, whose order is another in every process.
    whole.target_modules = sorted(whole.target_modules or ())
    target = out / FOLDER
    try:
        with building(target) as new:
            with new.filling() as temporary:
                whole.save_pretrained(str(temporary))
                file = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
                save_file(file, temporary / WEIGHTS, metadata={"format": "pt"})
            new.replace()
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {target}: {reason(error)}") from error
