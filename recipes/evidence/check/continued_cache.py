"""Several tokens after a cache are read as if there were none: the scan of more than one token begins at a zero state.

Right are the logits of one forward. Exits with 1 while the fault is there.
"""

import torch
from plain import cache_of, ids, judge, make

CELLS = {
    "cache, continued by chunks": ("mamba", "falcon_mamba", "jamba", "zamba", "minimax"),
    "prefill by chunks": ("jamba", "zamba"),
    "second turn on a returned cache": ("mamba", "falcon_mamba", "jamba", "zamba", "minimax"),
}


def difference(name: str) -> float:
    model, text = make(name), ids(1, 41)
    first = model(input_ids=text[:, :20], use_cache=True)
    named = {"position_ids": torch.arange(20, 41)[None]} if name == "minimax" else {}  # or they would begin at 0 again
    second = model(input_ids=text[:, 20:], use_cache=True, **cache_of(first), **named)
    return (second.logits - model(input_ids=text, use_cache=False).logits[:, 20:]).abs().max().item()


if __name__ == "__main__":
    judge(
        "tokens 20 to 40 after a cache of 20 differ", {name: difference(name) for name in CELLS["cache, continued by chunks"]}
    )
