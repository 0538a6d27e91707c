"""What the null key costs beside the scalar gate, at the shape of mamba2-130m: a training step and a token of decoding.

    OMP_NUM_THREADS=1 python recipes/evidence/gate/cost.py

Random weights; the same two heads of one layer under each gate, in turns; processor time of this process, so that other work on
the machine hardly matters. Writes cost.json beside this file.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, Mamba2Config, Mamba2ForCausalLM

import surgery
from surgery.records.plan import Start
from surgery.records.record import installed_version
from surgery.runtime.files import write_text

SHAPE = {"hidden_size": 768, "num_hidden_layers": 24, "state_size": 128, "head_dim": 64, "num_heads": 24, "n_groups": 1}
SITE, TOKENS, CONTEXT, ROUNDS, STEPS = "L12.H3,7", 256, 512, 7, 8  # STEPS: tokens that are timed at once


def make(base: Any, null: float | None) -> Any:
    """The hybrid, with a null key or without; with it, as many tokens are open as closed, or so."""
    starts = {name: Start(null=null) for name in surgery.Site.parse(SITE).head_names}
    return surgery.splice(base, surgery.Plan(sites=SITE, starts=starts, gate=0.5, closed_below=0.02 if null else 0.0))


def timed(work: Callable[[], object]) -> float:
    """Seconds of the processor."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def step(hybrid: Any, ids: torch.Tensor) -> None:
    """A forward and a backward pass, down to the gradients of the graft."""
    hybrid.train()(input_ids=ids, use_cache=False).logits.logsumexp(-1).mean().backward()


@torch.inference_mode()
def decode(hybrid: Any, cache: Any, ids: torch.Tensor) -> None:
    """STEPS tokens, one after the other."""
    for at in range(STEPS):
        hybrid(input_ids=ids[:, at : at + 1], use_cache=True, cache_params=cache)


def main() -> None:
    torch.manual_seed(0)
    base = Mamba2ForCausalLM(Mamba2Config(vocab_size=50288, expand=2, **SHAPE))
    hybrids = {"scalar": make(base, None), "null key": make(base, 5.0)}
    ids = torch.randint(1, 50288, (1, CONTEXT))
    caches = {}
    with torch.inference_mode():
        for name, hybrid in hybrids.items():
            caches[name] = DynamicCache(config=hybrid.config)
            hybrid.eval()(input_ids=ids, use_cache=True, cache_params=caches[name], logits_to_keep=1)
    seconds: dict[str, dict[str, list[float]]] = {"step": {}, "token": {}}
    for _ in range(ROUNDS):
        for name, hybrid in hybrids.items():
            hybrid.eval()
            token = timed(lambda hybrid=hybrid, cache=caches[name]: decode(hybrid, cache, ids)) / STEPS
            seconds["token"].setdefault(name, []).append(token)
            seconds["step"].setdefault(name, []).append(timed(lambda hybrid=hybrid: step(hybrid, ids[:, :TOKENS])))
    record: dict[str, Any] = {"version": installed_version("mamba-surgery"), "torch": torch.__version__, "rounds": ROUNDS}
    record |= {"shape": SHAPE, "site": SITE, "tokens_of_a_step": TOKENS, "context_of_a_token": CONTEXT}
    for what, each in seconds.items():
        scalar, null = (np.array(each[name][1:]) for name in hybrids)  # the first round warms up
        ratio = null / scalar
        record[what] = {
            "scalar_seconds": float(np.median(scalar)),
            "null_key_seconds": float(np.median(null)),
            "ratio": float(np.median(ratio)),
            "ratio_quartiles": np.quantile(ratio, [0.25, 0.75]).tolist(),
            "ratio_of_fastest": float(null.min() / scalar.min()),
        }
        print(f"{what}: the null key takes {record[what]['ratio']:.3f} times the scalar gate's time")
    write_text(Path(__file__).parent / "cost.json", json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
