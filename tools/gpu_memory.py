"""What a hybrid of mamba2-130m's shape holds on a GPU beyond its weights, and how fast it reads: python -m tools.gpu_memory

Forward (a prompt, the last token's logits) and with backward to the grafts, in bfloat16, with one head grafted, with random
weights, at several lengths; beside its base. With --device cpu it runs anywhere, for its own tests."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from surgery.records.plan import Plan
from surgery.runtime.timing import peak_bytes
from surgery.splicing.splice import adopt, graft_parameters, splice
from tools import bench_shapes as shapes
from tools.turns import milliseconds

LENGTHS = (1024, 4096, 16384)


def calls(model: Any, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What is measured of a model."""
    trained = list(graft_parameters(model).values())

    def forward() -> Any:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

    def backward() -> Any:
        loss = model(input_ids=ids, use_cache=False, logits_to_keep=64).logits.float().logsumexp(-1).mean()
        return torch.autograd.grad(loss, trained)

    return {"forward": forward} | ({"backward": backward} if trained else {})


def measured(name: str, lengths: tuple[int, ...], device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """One row for every model, length and pass: peak bytes beyond what was held before, and milliseconds."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    stock = shapes.BASES[name]().to(device, dtype).eval()
    hybrid = splice(stock, Plan.model_validate({"sites": ("L1.H3",)})).requires_grad_(False)
    for p in graft_parameters(hybrid).values():
        p.requires_grad_(True)
    rows = []
    for model, called in ((adopt(stock), "base"), (hybrid, "hybrid")):
        for tokens in lengths:
            ids = torch.arange(tokens, device=device)[None] % model.config.vocab_size
            for kind, call in calls(model, ids).items():
                times = milliseconds({kind: call}, device, seconds=seconds)
                row = {"model": called, "tokens": tokens, "pass": kind, "milliseconds": round(times[kind], 3)}
                rows.append(row | {"peak_bytes": peak_bytes(call, device), "weights": model.get_memory_footprint()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="mamba2-130m", choices=[*shapes.BASES])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    rows = measured(options.shape, tuple(options.lengths), torch.device(options.device), options.seconds)
    options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
