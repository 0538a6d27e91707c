"""MiniMax: reorder_cache leaves the states of its linear layers as they are, so beams go on from each other's.

Right is each row's own cache. Exits with 1 while the fault is there.
"""

import torch
from plain import ids, judge, make

CELLS = {"cache reordered": ("minimax",), "beam search": ("minimax",)}

if __name__ == "__main__":
    model, text, order = make("minimax"), ids(2, 21), torch.tensor([1, 0])
    cache = model(input_ids=text[:, :20], use_cache=True).past_key_values
    cache.reorder_cache(order)
    named = {"position_ids": torch.full((2, 1), 20)}
    found = model(input_ids=text[order, 20:], past_key_values=cache, use_cache=True, **named).logits
    right = model(input_ids=text[order], use_cache=False).logits[:, 20:]
    judge("rows whose cache was reordered differ", {"minimax": (found - right).abs().max().item()})
