"""What a step of KL on text (8 x 2,048 tokens, bfloat16: teacher, student, backward, one grafted layer) should take of
published models on a GPU. Calculated on "meta", without a GPU and without weights: python recipes/evidence/gpu/expected.py

Seconds: matrix products of the step, by torch's counter, at the rate of the measured step (h200-steps.jsonl) of that width, or
at those of the widths beside it. On another card by the ratio of peaks (dense bfloat16) or of memory bandwidth, whichever is
worse. The scan of Mamba-1 has not been measured on a GPU, so there it is at least that. GiB: weights, what the backward pass
keeps, and three times the logits in float32.
"""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from surgery.kernels import attention, conv, ssd
from surgery.kernels.attention import ATTEND
from surgery.kernels.conv import CAUSAL_CONV
from surgery.kernels.selective import SELECTIVE_SCAN
from surgery.kernels.ssd import SSD_SCAN
from surgery.modeling.falcon_mamba import FalconMambaHybridConfig, FalconMambaHybridForCausalLM
from surgery.modeling.mamba2 import Mamba2HybridConfig, Mamba2HybridForCausalLM

META, ROWS, TOKENS = torch.device("meta"), 8, 2048
CARDS = {
    "H200": (989, 4.8),
    "H100": (989, 3.35),
    "A100": (312, 2.0),
    "RTX 4090": (165, 1.0),
}  # TFLOP/s and TB/s, by their makers
MAMBA2 = {"mamba2-130m": (24, 768), "mamba2-780m": (48, 1536), "mamba2-2.7b": (64, 2560)}
MEASURED = {768: (24, "24 layers of width 768"), 2560: (8, "8 layers of width 2560")}


class Norm(torch.autograd.Function):
    """One kernel a pass, which keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.empty_like(dy)


def with_packages() -> None:
    """On "meta" as on a GPU with all packages; each is an operator."""
    for operation, name in (
        (SSD_SCAN, "mamba_ssm"),
        (SELECTIVE_SCAN, "mamba_ssm"),
        (CAUSAL_CONV, "causal_conv1d"),
        (ATTEND, "triton"),
    ):

        def run(*args: Any, operator: Any = operation.operator, name: str = name) -> Any:
            return operator(*args, backend=name)

        options = {"run": run, "refuses": lambda *_: None, "device": None, "probed": False}
        operation.backends[name] = dataclasses.replace(operation.backends[name], **options)
    for module in (ssd, conv, attention):
        module.on_gpu = lambda _: True  # type: ignore[attr-defined]
    F.rms_norm = lambda x, *_: Norm.apply(x)  # type: ignore[assignment]


def mamba2(layers: int, width: int) -> Any:
    graft = {"kind": "head", "layer": layers // 2, "heads": [0, 1, 2], "signs": [1, 1, 1], "width": 128}
    config = Mamba2HybridConfig(
        hidden_size=width, num_hidden_layers=layers, num_heads=width // 32, head_dim=64, state_size=128, n_groups=1,
        vocab_size=50288, tie_word_embeddings=True, grafts=[graft | {"time_step": True, "gated": True, "null": True}],
    )  # fmt: skip
    return Mamba2HybridForCausalLM(config)


def falcon_mamba() -> Any:
    """Falcon-Mamba-7B, with 24 channels in three pairs."""
    graft = {"kind": "head", "layer": 32, "heads": [*range(24)], "signs": [1, 1, 1], "width": 16, "time_step": True}
    graft |= {"gated": True, "null": True, "pairs": [[*range(first, first + 8)] for first in (0, 8, 16)]}
    config = FalconMambaHybridConfig(
        hidden_size=4096, intermediate_size=8192, num_hidden_layers=64, state_size=16, vocab_size=65024, grafts=[graft]
    )
    return FalconMambaHybridForCausalLM(config)


def count(make: Any) -> tuple[float, float]:
    """(TFLOP of matrix products, GiB) of a step."""
    with META:
        hybrid = make().to(torch.bfloat16).train()
    for name, parameter in hybrid.named_parameters():
        parameter.requires_grad_(".graft." in name)
    own = {p.untyped_storage()._cdata for p in hybrid.parameters()}
    kept: dict[int, Any] = {}

    def keep(m: torch.Tensor) -> torch.Tensor:
        kept[m.untyped_storage()._cdata] = m.untyped_storage()
        return m

    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long, device=META)
    with FlopCounterMode(display=False) as flops, saved_tensors_hooks(keep, lambda m: m):
        with torch.no_grad(), hybrid.disable_grafts():
            hybrid(input_ids=ids, use_cache=False)
        logits = hybrid(input_ids=ids, use_cache=False).logits
        torch.autograd.grad(logits, [p for p in hybrid.parameters() if p.requires_grad], torch.empty_like(logits))
    weights = sum(p.numel() * p.element_size() for p in hybrid.parameters())
    held = sum(storage.nbytes() for key, storage in kept.items() if key not in own)
    return flops.get_total_flops() / 1e12, (weights + held + 3 * logits.numel() * 4) / 2**30


def main() -> None:
    with_packages()
    lines = [json.loads(line) for line in (Path(__file__).parent / "h200-steps.jsonl").read_text().splitlines()]
    ms = {line["name"]: line["ms"] for line in lines if line.get("part") == "step" and "ms" in line}
    rates = {width: count(partial(mamba2, layers, width))[0] / ms[name] * 1e3 for width, (layers, name) in MEASURED.items()}
    print("| model | TFLOP | GiB | " + " | ".join(f"{card}, s" for card in CARDS) + " |")
    print("|---" * (3 + len(CARDS)) + "|")
    models = {name: (partial(mamba2, *sizes), sizes[1]) for name, sizes in MAMBA2.items()}
    for name, (make, width) in (models | {"Falcon-Mamba-7B": (falcon_mamba, 4096)}).items():
        work, room = count(make)
        beside = {max(w for w in rates if w <= width), min((w for w in rates if w >= width), default=max(rates))}
        seconds = sorted(work / rates[w] for w in beside)
        cells = []
        for card in CARDS.values():
            worse = max(CARDS["H200"][i] / card[i] for i in (0, 1))
            cells.append(" \N{EN DASH} ".join(f"{each * worse:.2g}" for each in seconds))
        least = "at least " if make is falcon_mamba else ""
        print(f"| {name} | {work:.0f} | {room:.0f} | " + " | ".join(least + cell for cell in cells) + " |")


if __name__ == "__main__":
    main()
