"""Families whose hybrids are made inside a stock model (surgery/hybrids/stock_hybrid.py).

A family of this kind is one file:

    FAMILY = StockSSDFamily(stock_hybrid(BambaForCausalLM, BambaMixer, SSDMixer))

A mixer of another kind brings a family of its own: StockFamily before a DualFamily with `graft` and `initialise`. Sizes are
read from a mixer of the stock class, made without values, so no name of a configuration's field is needed. What the model does
between its mixers stays transformers' own, so no field of its configuration can be refused as unknown.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from surgery.errors import UserError
from surgery.families.dual_start import OWN, DualFamily
from surgery.families.mamba import ChannelFamily
from surgery.families.mamba2 import Mamba2Family
from surgery.hybrids.layer_graft import is_layer_graft
from surgery.models.anatomy import blocks_of
from surgery.records.plan import Plan

# What is chosen for a model, and is no field of its configuration's file.
CHOSEN = ("_attn_implementation_internal", "_experts_implementation_internal")


class StockFamily(DualFamily):
    """hybrid: of stock_hybrid. Stands before a family that says how the graft of a mixer starts."""

    base: Any
    hybrid: Any
    copies = False  # some scale what is added
    own = tuple(name for name in OWN if name != "layer_types")  # which are the base's

    def __init__(self, hybrid: Any):
        super().__init__(hybrid.stock, hybrid, frozenset())

    def check(self, config: PreTrainedConfig) -> None:
        """Nothing is refused: whatever a field says, transformers' own code does."""

    def adopted(self, model: Any) -> bool:
        """The stock model is run as it is, where only grafted mixers become ours."""
        return isinstance(model, self.hybrid if self.hybrid.all_mixers else self.base | self.hybrid)

    def mixer(self, config: Any) -> Any:
        """A stock mixer, without values."""
        places = {"layer_idx": 0} if "layer_idx" in inspect.signature(self.hybrid.stock_mixer).parameters else {}
        with torch.device("meta"):
            return self.hybrid.stock_mixer(config, **places)

    def shape(self, config: Any) -> tuple[int, int]:
        """Heads: those that can be grafted, of a layer that has any."""
        mixer = self.mixer(config)
        return config.num_hidden_layers, getattr(mixer, "num_heads", None) or mixer.intermediate_size

    def graftable(self, model: Any) -> list[int]:
        layers = enumerate(blocks_of(model))
        return [i for i, block in layers if any(isinstance(m, self.hybrid.stock_mixer) for m in block.modules())]

    def state_size(self, config: Any) -> int:
        return self.mixer(config).ssm_state_size

    def empty(self, config: PreTrainedConfig, plan: Plan | None, layers: Sequence[dict[str, Any]] = ()) -> Any:
        if any(map(is_layer_graft, layers)):
            raise UserError(f"a {self.model_type} model takes no layer grafts, head grafts alone (plan.kind: head)")
        return super().empty(config, plan, layers)

    def choose(self, config: PreTrainedConfig, other: PreTrainedConfig) -> None:
        for name in CHOSEN:
            if (value := getattr(config, name, None)) is not None:
                setattr(other, name, value)


class StockSSDFamily(StockFamily, Mamba2Family):
    """Whose mixers are Mamba-2's."""


class StockChannelFamily(StockFamily, ChannelFamily):
    """Whose mixers are Mamba-1's."""
