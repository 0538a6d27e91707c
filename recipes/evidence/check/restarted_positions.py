"""Bamba and MiniMax: positions begin at 0 again after a cache, unless position_ids are given.

Right are the logits of one forward, as they are with position_ids. Exits with 1 while the fault is there.
"""

import torch
from plain import ids, judge, make

CELLS = {"cache, token by token": ("bamba", "minimax"), "cache, continued by chunks": ("bamba", "minimax")}


def difference(name: str, told: bool) -> float:
    model, text, cache, logits = make(name), ids(1, 41), None, []
    for begin, end in [(0, 20), *((t, t + 1) for t in range(20, 41))]:
        named = {"position_ids": torch.arange(begin, end)[None]} if told else {}
        output = model(input_ids=text[:, begin:end], past_key_values=cache, use_cache=True, **named)
        cache, logits = output.past_key_values, [*logits, output.logits]
    return (torch.cat(logits, 1) - model(input_ids=text, use_cache=False).logits).abs().max().item()


if __name__ == "__main__":
    pairs = [(name, told) for name in CELLS["cache, token by token"] for told in (False, True)]
    found = {f"{name} {'with' if told else 'without'} position_ids": difference(name, told) for name, told in pairs}
    judge("tokens after a cache differ", found)
