"""Nemotron-H and Zamba2: decoding bounds the time step by time_step_min, and a forward of the whole text does not.

Right is one bound for both; with time_step_min = 1e-30 they agree. Exits with 1 while the fault is there.
"""

import torch
from plain import ids, judge, make

LAWS = ("cache, token by token", "generate against no cache", "second turn on a returned cache", "static cache")
CELLS = dict.fromkeys((*LAWS, "prefill by chunks", "beam search"), ("nemotron_h", "zamba2"))


def difference(name: str, least: float) -> float:
    model, text = make(name, time_step_min=least), ids(1, 30)
    cache, logits = model(input_ids=text[:, :20], use_cache=True).past_key_values, []
    for t in range(20, 30):
        named = {"position_ids": torch.tensor([[t]]), "past_key_values": cache}
        logits.append(model(input_ids=text[:, t : t + 1], use_cache=True, **named).logits)
    return (torch.cat(logits, 1) - model(input_ids=text, use_cache=False).logits[:, 20:]).abs().max().item()


if __name__ == "__main__":
    found = {f"{name}, time_step_min={least:g}": difference(name, least) for name in CELLS[LAWS[0]] for least in (0.001, 1e-30)}
    judge("tokens after a cache differ", found)
