"""Mamba-1 and Falcon-Mamba: one token after a cache, with a mask of the whole text, as transformers passes it elsewhere.

The mixer multiplies the token by every entry of the mask, which makes as many tokens of it. Right are one forward's logits.
Exits with 1 while the fault is there.
"""

import torch
from plain import cache_of, ids, judge, make

CELLS = {"cache, token by token": ("mamba", "falcon_mamba"), "cache, continued by chunks": ("mamba", "falcon_mamba")}


def difference(name: str) -> float | str:
    model, text = make(name), ids(1, 24)
    output, logits = model(input_ids=text[:, :20], use_cache=True), []
    for t in range(20, 24):
        mask = torch.ones(1, t + 1, dtype=torch.long)
        output = model(input_ids=text[:, t : t + 1], attention_mask=mask, use_cache=True, **cache_of(output))
        logits.append(output.logits)
    return (torch.cat(logits, 1) - model(input_ids=text, use_cache=False).logits[:, 20:]).abs().max().item()


if __name__ == "__main__":
    judge("tokens after a cache, with a mask, differ", {name: difference(name) for name in CELLS["cache, token by token"]})
