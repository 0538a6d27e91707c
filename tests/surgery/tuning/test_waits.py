"""A step of tuning waits for a GPU once, for its log. On "meta" there are no numbers to wait for, and whatever asks for one
fails."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from surgery.records.recipe import Data, Hints
from surgery.tuning import loop
from surgery.tuning.examples import Batches
from surgery.tuning.loop import Run, trained_parameters
from tests.surgery.tuning.small import TOKENIZER, few_steps, toy_hybrid

META = torch.device("meta")


class Accelerator(loop.Accelerator):
    device = META  # type: ignore[assignment]


class Copies(TorchDispatchMode):
    """Notes copies from the host to the device for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.slow: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        is_sent = operator.name() == "aten::_to_copy" and args[0].device.type == "cpu" and out.is_meta
        if is_sent and not (kwargs or {}).get("non_blocking"):
            self.slow.append(str(tuple(out.shape)))
        return out


@pytest.mark.parametrize("more", [{}, {"bigram_weight": 0.5, "hints": Hints()}], ids=["plain", "bigrams and hints"])
def test_a_step_waits_once(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    read: list[int] = []

    def tolist(m: torch.Tensor, plain: Any = torch.Tensor.tolist) -> Any:
        if not m.is_meta:
            return plain(m)
        read.append(len(m))
        return [0.0] * len(m)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    monkeypatch.setattr(loop, "Accelerator", Accelerator)
    monkeypatch.setattr(Run, "_settings", dict)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # it does not know this device
    hybrid = toy_hybrid(dtype=torch.float32).train().to(META)
    options = few_steps(text_tokens=64, **more)
    run = Run(hybrid, None, trained_parameters(hybrid), Batches(TOKENIZER, options, Data(), 0), None, "tuned")
    try:
        record = run.take_step(0)
        assert "kl" in record
        assert read == [len(record) + 1]  # with the norm of the gradient
        with Copies() as copies:
            run.take_step(1)
        assert copies.slow == []
    finally:
        run.close()
