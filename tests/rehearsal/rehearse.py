"""Rehearses what every verb asks of a model, and shows that the rehearsal finds what is planted: one line of JSON for each, for
test_rehearsal.py. Run as a process of its own: python -m tests.rehearsal.rehearse."""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM

from surgery.records.plan import Plan
from surgery.splicing.splice import adopt, splice
from tests.conftest import random_base, random_llamba, random_selective
from tests.rehearsal.device import register, rehearsed

BASES: dict[str, tuple[Callable[[], Any], str]] = {
    "mamba2": (partial(random_base, num_hidden_layers=2), "L1.H1,4"),
    "mamba": (partial(random_selective, MambaConfig, MambaForCausalLM, num_hidden_layers=2), "L1.H0,3,4,9"),
    "falcon_mamba": (partial(random_selective, FalconMambaConfig, FalconMambaForCausalLM, num_hidden_layers=2), "L1.H0,3,4,9"),
    "llamba": (partial(random_llamba, n_layer=2), "L1.H1,4"),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def ids(device: torch.device, tokens: int) -> Tensor:
    return torch.zeros(2, tokens, dtype=torch.long, device=device)


def read(model: Any, dtype: torch.dtype) -> None:
    """What bench and locate do: a forward pass."""
    with torch.no_grad(), rehearsed(model, dtype) as watch:
        model(input_ids=ids(watch.device, 11), use_cache=False)


def learn(model: Any, dtype: torch.dtype) -> None:
    """What tune and attribution do: a backward pass to every tensor."""
    model.train().requires_grad_(True)
    with rehearsed(model, dtype) as watch:
        tokens = ids(watch.device, 11)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        for name, p in model.named_parameters():
            if p.grad is not None and (p.grad.dtype, p.grad.device) != (p.dtype, p.device):
                raise AssertionError(f"the gradient of {name} is in {p.grad.dtype} on {p.grad.device}")


def generate(model: Any, dtype: torch.dtype) -> None:
    """A prompt, and steps of decoding with the mask that generate passes."""
    with torch.no_grad(), rehearsed(model, dtype) as watch:
        cache = DynamicCache(config=model.config)
        model(input_ids=ids(watch.device, 11), cache_params=cache, use_cache=True)
        watch.decoding = True
        for step in range(2):
            mask = torch.ones(2, 12 + step, dtype=torch.long, device=watch.device)
            model(input_ids=ids(watch.device, 1), cache_params=cache, use_cache=True, attention_mask=mask)


def plant(model: Any, fault: str) -> None:
    """A fault in the last mixer's `finish`."""
    mixer = model.backbone.layers[-1].mixer
    finish = mixer.finish

    def copied(y: Tensor, gate: Tensor) -> Tensor:
        return finish(y.cpu().to(gate.device), gate)

    def elsewhere(y: Tensor, gate: Tensor) -> Tensor:
        return finish(y * torch.ones(y.shape[-1]), gate)

    def looked_at(y: Tensor, gate: Tensor) -> Tensor:
        return finish(y if y.sum() > 0 else -y, gate)

    def wide(y: Tensor, gate: Tensor) -> Tensor:
        return torch.nn.functional.linear(y.flatten(-2).float(), mixer.out_proj.weight.float()).to(gate.dtype)

    def listed(y: Tensor, gate: Tensor) -> Tensor:
        return finish(y[:, :, [*range(y.shape[2])]], gate)

    mixer.finish = {"cpu": copied, "elsewhere": elsewhere, "sync": looked_at, "float32": wide, "list": listed}[fault]


def outcome(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:  # what is found is the result
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "ok"


def main(asked: list[str]) -> None:
    families = [family for family in asked if family in BASES] or BASES
    dtypes = [dtype for dtype in DTYPES if str(dtype).removeprefix("torch.") in asked] or DTYPES
    for family, (make, sites) in BASES.items():
        for kind in ("base", "hybrid") if family in families else ():
            for verb in (read, learn, generate):
                for dtype in dtypes:
                    base = make()
                    model = adopt(base) if kind == "base" else splice(base, Plan(sites=(sites,)))
                    result = outcome(lambda: verb(model, dtype))  # noqa: B023
                    print(json.dumps([family, kind, verb.__name__, str(dtype).removeprefix("torch."), result]), flush=True)
    for fault in ("cpu", "elsewhere", "sync", "float32", "list"):
        model = splice(BASES["mamba2"][0](), Plan(sites=("L1.H1",)))
        plant(model, fault)
        print(json.dumps(["planted", fault, outcome(lambda: generate(model, torch.bfloat16))]), flush=True)  # noqa: B023


if __name__ == "__main__":
    register()
    main(sys.argv[1:])
