"""Mamba-1 (arXiv 2312.00752) in its Hugging Face class: state-spaces' mamba-*-hf. A head is a channel."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import MambaConfig, MambaForCausalLM, PreTrainedConfig, PreTrainedModel

from surgery.errors import UserError
from surgery.families import COMMON, refuse_unhandled
from surgery.plan import Plan
from surgery.selective import MambaKernelMixer

HANDLED = COMMON | {"intermediate_size", "time_step_scale", "time_step_init_scheme", "use_mambapy", "use_associative_scan"}


class SelectiveFamily:
    """A family whose base runs on the selective scan. It has no grafts so far, so no class of its own."""

    def __init__(self, config_class: type, model_class: type, mixer_class: type[nn.Module], handled: frozenset[str]):
        self.config_class, self.model_class, self.mixer_class, self.handled = config_class, model_class, mixer_class, handled
        self.model_type = self.hybrid_type = config_class.model_type  # type: ignore[attr-defined]

    def check(self, config: PreTrainedConfig) -> None:
        refuse_unhandled(config, self.config_class(), self.handled)

    def shape(self, config: PreTrainedConfig) -> tuple[int, int]:
        return config.num_hidden_layers, config.intermediate_size

    def check_graftable(self) -> None:
        raise UserError(f"a {self.model_type} model cannot be grafted yet; it can be loaded and benchmarked")

    def adopted(self, model: Any) -> bool:
        return all(isinstance(block.mixer, self.mixer_class) for block in model.backbone.layers)

    def empty(self, config: PreTrainedConfig, plan: Plan | None) -> PreTrainedModel:
        if plan and plan.sites:
            self.check_graftable()
        model = self.empty_base(config)
        for block in model.backbone.layers:
            block.mixer.__class__ = self.mixer_class  # it has the same tensors, and another forward
        return model

    def initialise(self, mixer: Any, plan: Plan) -> None:
        raise NotImplementedError("there are no grafts to initialise")

    def empty_base(self, config: PreTrainedConfig) -> Any:
        with torch.device("meta"):
            return self.model_class(copy.deepcopy(config))


FAMILY = SelectiveFamily(MambaConfig, MambaForCausalLM, MambaKernelMixer, HANDLED)
