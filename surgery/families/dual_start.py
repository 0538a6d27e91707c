"""What all families with a dual graft share: how a base's configuration becomes a hybrid's, and back.

A family is one file:

    FAMILY = Mamba2Family(stock_hybrid(BambaForCausalLM, BambaMixer, SSDMixer))

A mixer of another kind brings a family of its own: a subclass with `graft` and `initialise`. Sizes are read from a mixer of the
stock class, made without values, so no name of a configuration's field is needed.
"""

import copy
import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from surgery.errors import UserError
from surgery.families import refuse_unhandled
from surgery.hybrids.layer_graft import is_layer_graft
from surgery.hybrids.patching import become
from surgery.hybrids.spliced import Spliced
from surgery.models.anatomy import blocks_of
from surgery.records.plan import Plan
from surgery.records.site import Site
from surgery.runtime.ownership.complaints import reason
from surgery.runtime.ownership.replacing import building

# Fields that only a hybrid's configuration has, or whose values differ from its base's.
OWN = ("model_type", "architectures", "grafts", "auto_map")
# What is chosen for a model, and is no field of its configuration's file.
CHOSEN = ("_attn_implementation_internal", "_experts_implementation_internal")


class DualFamily:
    """hybrid: of stock_hybrid. fields: those of a configuration that its forward understands, where that is ours; unless given,
    what a field says is what transformers' own code makes of it, and none is refused. copies: as Family says."""

    def __init__(self, hybrid: Any, fields: frozenset[str] | None = None, *, copies: bool = False):
        self.base, self.hybrid, self.copies = hybrid.stock, hybrid, copies
        self.fields = None if fields is None else fields | {"grafts", "auto_map", "quantization_config"}
        self.base_config, self.hybrid_config = self.base.config_class, hybrid.config_class
        self.model_type, self.hybrid_type = self.base_config.model_type, self.hybrid_config.model_type

    def check(self, config: PreTrainedConfig) -> None:
        if self.fields is not None:
            refuse_unhandled(config, self.base_config(), self.fields)

    def adopted(self, model: Any) -> bool:
        """A stock model is run as it is, unless all mixers of its hybrid are ours."""
        return isinstance(model, self.hybrid) or (isinstance(model, self.base) and not self.hybrid.all_mixers)

    def mixer(self, config: Any) -> Any:
        """A stock mixer, without values."""
        places = {"layer_idx": 0} if "layer_idx" in inspect.signature(self.hybrid.stock_mixer).parameters else {}
        with torch.device("meta"):
            return self.hybrid.stock_mixer(config, **places)

    def grafted_mixer(self, config: Any, plan: Plan, site: Site) -> Any:
        """A mixer with a site's graft, without values."""
        mixer, spec = self.mixer(config), self.graft(config, plan, site)
        become(mixer, self.hybrid.mixer_class)
        mixer.layer_idx = site.layer
        with torch.device("meta"):
            mixer.take_grafts(SimpleNamespace(grafts=[spec]))
        return mixer

    def shape(self, config: Any) -> tuple[int, int]:
        """Heads: those that can be grafted, of a layer that has any."""
        mixer = self.mixer(config)
        return config.num_hidden_layers, getattr(mixer, "num_heads", None) or mixer.intermediate_size

    def graftable(self, model: Any) -> Sequence[int]:
        layers = enumerate(blocks_of(model))
        return [i for i, block in layers if any(isinstance(m, self.hybrid.stock_mixer) for m in block.modules())]

    def state_size(self, config: Any) -> int:
        """The dimensions of B and C."""
        return self.mixer(config).ssm_state_size

    def cut(self, mixer: Any, kept: Tensor) -> dict[str, Tensor]:
        """The tensors of a mixer, by name, whose state keeps the dimensions kept (groups, size) alone. Raises UserError where
        that cannot be done."""
        raise UserError(f"the state of a {self.model_type} stays as large as it is; that of mamba and mamba2 can be cut")

    def graft(self, config: Any, plan: Plan, site: Site) -> dict[str, Any]:
        """The entry of the hybrid configuration's `grafts` for the grafted heads of one layer."""
        raise NotImplementedError

    def initialise(self, mixer: Any, plan: Plan) -> None:
        raise NotImplementedError

    def configured(self, config: PreTrainedConfig, plan: Plan | None, layers: Sequence[dict[str, Any]] = ()) -> Any:
        grafts = list(layers)
        if any(is_layer_graft(spec) and spec["mlp"] for spec in grafts) and not self.hybrid.plain_blocks:
            raise UserError(f"layer grafts in a {self.model_type} come without their donor's MLP: leave it out (mlp: false)")
        if plan is not None and plan.kind == "head":
            grafts += [self.graft(config, plan, site) for site in plan.sites]
        return _converted(config, self.hybrid_config, grafts=grafts)

    def empty(self, config: PreTrainedConfig, plan: Plan | None, layers: Sequence[dict[str, Any]] = ()) -> Any:
        with torch.device("meta"):
            return self.hybrid(self.configured(config, plan, layers))

    def empty_base(self, config: PreTrainedConfig) -> Any:
        with torch.device("meta"):
            return self.base(_converted(config, self.base_config))


def _converted(config: PreTrainedConfig, kind: Any, **more: Any) -> Any:
    """A configuration of another class, with the fields that a base and its hybrid have in common."""
    fields = {name: value for name, value in copy.deepcopy(config.to_dict()).items() if name not in OWN}
    other = kind(**fields, **more)
    for name in CHOSEN:
        if (value := getattr(config, name, None)) is not None:
            setattr(other, name, value)
    return other


@contextmanager
def _saving(hybrid: Any, folder: Any, is_main: bool) -> Iterator[Path]:
    """Where a hybrid is written, before it goes to `folder`: file by file, beside what is there."""
    base = hybrid.surgery and hybrid.surgery.base
    if base and os.path.realpath(base) == os.path.realpath(folder):
        raise UserError(f"{folder} holds the hybrid's base, which is not replaced; choose another folder")
    try:
        with building(Path(folder)) as new:
            with new.filling() as place:
                yield place
            if is_main:  # of several processes, each of which writes
                new.merge()
    except OSError as error:
        raise UserError(f"cannot write {folder}: {reason(error)}") from error


Spliced.saving = _saving


def common_spec(plan: Plan, site: Site, state_size: int) -> dict[str, Any]:
    """What the entry of every family holds."""
    width = plan.width or max(32, state_size)
    if width < state_size:
        raise UserError(f"a {plan.init} graft needs a width of at least the state size, {state_size}; the plan says {width}")
    return {
        "kind": "head",
        "layer": site.layer,
        "heads": list(site.heads),
        "width": width,
        "time_step": plan.time_step,
        "blend": plan.blend,
    }


def widen(target: Tensor, base: Tensor, groups: list[int], extra: float, generator: torch.Generator) -> None:
    """Fill `target` (pairs * width, ...) from `base` (groups, n, ...): each pair from its group; the dimensions beyond n are
    normal with standard deviation `extra`."""
    view = target.view(len(groups), -1, *target.shape[1:])
    view.copy_(torch.randn(view.shape, generator=generator) * extra)
    view[:, : base.shape[1]] = base[groups]


def start_gate(graft: Any, plan: Plan) -> None:
    if graft.gate is not None:
        assert plan.blend is not None  # or there would be no gate
        graft.gate.fill_(plan.blend)


def generator(plan: Plan, layer: int) -> torch.Generator:
    """Of the random numbers that a layer's graft starts with."""
    return torch.Generator().manual_seed(plan.seed * 1009 + layer)
