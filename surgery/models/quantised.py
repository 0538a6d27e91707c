"""Quantised models (bitsandbytes, 8 and 4 bits): the weights of their linear modules are integers, with scales beside them.

Such a weight means something to its own module alone. So a hybrid uses the base's modules, not only their tensors, and the
weight itself, in floating point, is to be had from `dense`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.hybrids.parts import is_quantised_weight
from surgery.models.answers import settle

# The attributes of a quantised model by which transformers knows how to save and move it.
NOTES = ("hf_quantizer", "is_quantized", "quantization_method", "is_loaded_in_8bit", "is_loaded_in_4bit")


def is_quantised(model: nn.Module) -> bool:
    return bool(getattr(model, "is_quantized", False))


def has_quantised_weight(module: nn.Module) -> bool:
    """Whether this is a linear module whose weight is not what it multiplies by: integers, or float8 beside its scales."""
    return isinstance(module, nn.Linear) and is_quantised_weight(module.weight)


def dense(module: nn.Linear) -> Tensor:
    """The weight (out, in) in floating point: the module's own, or what its integers stand for.

    Raises UserError if they are of another method than bitsandbytes.
    """
    weight: Any = module.weight
    if not has_quantised_weight(module):
        return weight
    if type(weight).__name__ not in ("Int8Params", "Params4bit"):
        raise UserError(f"a base quantised as {type(module).__name__} cannot be grafted; use bitsandbytes, or floating point")
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    return dequantize_bnb_weight(weight, getattr(module, "state", None)).reshape(module.out_features, -1)


def exact(model: PreTrainedModel) -> None:
    """Make quantised modules compute with the numbers that are stored.

    Raises UserError if bitsandbytes has changed these: see answers.settle.
    """
    settle(model)
    for module in model.modules():
        if getattr(getattr(getattr(module, "weight", None), "quant_state", None), "packing_format_for_cpu", False):
            raise UserError("this 4-bit model has run on a CPU, where bitsandbytes changed its scales; load it once more")


def note(source: Any, target: Any, kept: list[str]) -> None:
    """Mark a model that uses the modules of a quantised one as quantised. kept: names of its modules that are not quantised."""
    for name in NOTES:
        if name in vars(source):
            setattr(target, name, vars(source)[name])
    # As a dictionary: the source's own object stays as it is.
    settings = source.config.to_dict()["quantization_config"]
    skipped = {*source.hf_quantizer.modules_to_not_convert, *(settings.get("llm_int8_skip_modules") or ()), *kept}
    target.config.quantization_config = settings | {"llm_int8_skip_modules": sorted(skipped)}


def converted(model: Any, dtype: torch.dtype, name: str) -> Any:
    """The model in another dtype; what accelerate has put away becomes so when it is fetched. Raises UserError if the model is
    quantised and computes in another one."""
    if not is_quantised(model):
        return nn.Module.to(model, dtype)  # accelerate refuses model.to, which might be meant to move weights
    if model.dtype != dtype:
        raise UserError(f"{name} is quantised and computes in {model.dtype}; it cannot be converted to {dtype}")
    return model
