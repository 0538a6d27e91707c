"""One file per model family, found by listing this folder and those of the same name around the core (surgery/more/families).
A new family is a new file there that defines `FAMILY`, or an entry point of another package.

A family says which Hugging Face configurations it understands, where heads live, and how a graft starts from the base's own
weights. Every function that needs to know about an architecture asks its family.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.errors import UserError
from surgery.families.inert import entry_of
from surgery.records.plan import Plan
from surgery.records.site import Site
from surgery.runtime.listing import listed

GROUP = "surgery.families"  # of entry points
Hybrid = Any  # a PreTrainedModel of a family's hybrid class; what its own attributes are is beyond mypy


class Family(Protocol):
    """What the toolkit asks of a model family."""

    model_type: str
    hybrid_type: str
    fields: frozenset[str] | None  # of configurations, that a forward of ours understands; None where it is transformers'
    copies: bool  # whether grafts can copy: what a mixer puts out is added to the residual stream as it is

    def check(self, config: PreTrainedConfig) -> None:
        """Raise UserError if the configuration holds a field that is neither handled nor at its default."""

    def adopted(self, model: PreTrainedModel) -> bool:
        """Whether the model already runs on this project's kernels."""

    def shape(self, config: PreTrainedConfig) -> tuple[int, int]:
        """(layers, heads per layer)."""

    def graftable(self, model: PreTrainedModel) -> Sequence[int]:
        """The layers whose mixers can hold grafts, of a base or a hybrid."""

    def configured(self, config: PreTrainedConfig, plan: Plan | None, layers: Sequence[dict[str, Any]] = ()) -> Any:
        """The hybrid's configuration, from a base's and a plan. layers: its entries of layer grafts, in place of what the plan
        says of heads."""

    def empty(self, config: PreTrainedConfig, plan: Plan | None, layers: Sequence[dict[str, Any]] = ()) -> PreTrainedModel:
        """The hybrid of such a configuration, without values in its tensors (on the meta device)."""

    def grafted_mixer(self, config: PreTrainedConfig, plan: Plan, site: Site) -> Any:
        """A mixer with a site's graft, without values in its tensors, and without a model around it."""

    def initialise(self, mixer: Any, plan: Plan) -> None:
        """Give the mixer's graft, which has storage but no values, its first weights."""

    def cut(self, mixer: Any, kept: Tensor) -> dict[str, Tensor]:
        """The tensors of a mixer, by name, whose state keeps the dimensions kept (groups, size) alone. Raises UserError where
        that cannot be done."""

    def empty_base(self, config: PreTrainedConfig) -> PreTrainedModel:
        """The stock class for a hybrid's configuration, on the meta device."""


# Fields of every configuration that do not change what a model computes, or that transformers itself honours.
COMMON = frozenset(
    """
    vocab_size hidden_size num_hidden_layers layer_norm_epsilon use_bias use_conv_bias hidden_act residual_in_fp32 conv_kernel
    state_size expand tie_word_embeddings use_cache pad_token_id bos_token_id eos_token_id initializer_range time_step_rank
    time_step_min time_step_max time_step_floor rescale_prenorm_residual dtype torch_dtype architectures transformers_version
    model_type name_or_path _name_or_path output_hidden_states return_dict is_decoder
    """.split()
)


def refuse_unhandled(config: PreTrainedConfig, defaults: PreTrainedConfig, handled: frozenset[str]) -> None:
    """Raise UserError for the first field that is not in `handled`, not as in `defaults`, and not inert (inert.py) at its
    value."""
    usual = defaults.to_dict()
    for name, value in config.to_dict().items():
        if name in handled or (name in usual and value == usual[name]):
            continue
        entry = entry_of(name, config)
        if entry is None or not entry.holds(value, config):
            only = f", only {entry.only} is" if entry else ""
            family = defaults.model_type
            raise UserError(f"the configuration's field '{name}' ({value!r}) is not handled by the {family} family{only}")


@cache
def families() -> dict[str, Family]:
    """model_type -> family, for bases and hybrids: those of the folders, and what other packages offer as entry points of the
    group "surgery.families"."""
    known = [module.FAMILY for module in _modules() if hasattr(module, "FAMILY")]
    known += [entry.load() for entry in entry_points(group=GROUP)]
    return {model_type: family for family in known for model_type in (family.model_type, family.hybrid_type)}


def register() -> None:
    """Import every family, whose module registers its hybrid classes with transformers. What another package offers and cannot
    be imported is a warning here, because an import of transformers may be the occasion; families() raises its error."""
    _modules()
    for entry in entry_points(group=GROUP):
        if entry.module in sys.modules:  # perhaps half imported: it is this import that brought us here
            continue
        try:
            entry.load()
        except Exception as error:  # whatever a foreign package raises
            warnings.warn(f"the model family '{entry.name}' cannot be imported: {error!r}", stacklevel=2)


def _modules() -> list[ModuleType]:
    return [importlib.import_module(module) for module in listed("families").values()]


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a configuration. Raises UserError if there is none."""
    known = families()
    if config.model_type not in known:
        bases = ", ".join(sorted(family.model_type for family in set(known.values())))
        raise UserError(
            f"model type '{config.model_type}' is not supported as a base (supported: {bases}); "
            f"it takes one file, surgery/more/families/{config.model_type}.py, or an entry point of the group surgery.families"
        )
    return known[config.model_type]
