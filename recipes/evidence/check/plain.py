"""What the scripts beside this file share: small random models of transformers, of the configurations in architectures.json.

A script names in CELLS the cells of the table of architectures whose fault it shows: law -> architectures.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

ARCHITECTURES = json.loads((Path(__file__).parent / "architectures.json").read_text(encoding="utf-8"))["architectures"]
WRONG = 1e-4  # more than float32's rounding of these logits
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}


def make(name: str, **options: Any) -> Any:
    """A model with weights large enough for its state to matter; as transformers initialises them, it hardly does."""
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    config = AutoConfig.for_model(**ARCHITECTURES[name]["config"] | options)
    model = AutoModelForCausalLM.from_config(config).eval()
    for part, parameter in model.named_parameters():
        if parameter.dim() > 1 and "A_log" not in part:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        elif not parameter.any():
            parameter.normal_(std=0.1)
    return model


def ids(*shape: int) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(1))


def cache_of(output: Any) -> dict[str, Any]:
    """The cache in an output, under the name by which the forward takes it."""
    return {name: output[name] for name in ("past_key_values", "cache_params", "state") if output.get(name) is not None}


def judge(what: str, found: Mapping[str, float | str]) -> None:
    """Print differences, or errors; exit with 1 if there is a fault among them."""
    for name, value in found.items():
        print(f"{name}: {value}" if isinstance(value, str) else f"{name}: {what} by {value:.2g}")
    sys.exit(any(isinstance(value, str) or value > WRONG for value in found.values()))
