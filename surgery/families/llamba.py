"""Llamba (arXiv 2502.14458) in its published layout. Base and hybrid are the same class: transformers has none of its own.

The dual graft of a head: with no time step to scale what is written,

    y_t = sigma sum_{s<=t} softmax_s(sigma tau C'_t . B'_s) x_s + D x_t
"""

from typing import Any

from torch import Tensor

from surgery.errors import UserError
from surgery.families import COMMON
from surgery.families.dual_start import DualFamily
from surgery.families.mamba2 import Mamba2Family
from surgery.hybrids.llamba import LlambaForCausalLM
from surgery.records.plan import Plan
from surgery.records.site import Site


class LlambaFamily(Mamba2Family):
    gate_first = False

    def check(self, config: Any) -> None:
        """What its sections mlp_cfg and ssm_cfg may hold, the configuration knows by itself."""
        super().check(config)
        if config.norm_epsilon != 1e-5:  # the published code has 1e-5 within blocks, whatever it says
            name, value = "norm_epsilon", config.norm_epsilon
            raise UserError(f"the configuration's field '{name}' ({value!r}) is not handled by the llamba family, only 1e-5 is")

    def cut(self, mixer: Any, kept: Tensor) -> dict[str, Tensor]:
        return DualFamily.cut(self, mixer, kept)

    def graft(self, config: Any, plan: Plan, site: Site) -> dict[str, Any]:
        return {**super().graft(config, plan, site), "time_step": False}


HANDLED = COMMON | {"d_model", "n_layer", "tie_embeddings", "norm_epsilon", "pad_vocab_size_multiple", "lm_head_bias"}
HANDLED |= {"resid_dropout", "mlp_cfg", "ssm_cfg"}
FAMILY = LlambaFamily(LlambaForCausalLM, HANDLED, copies=True)
