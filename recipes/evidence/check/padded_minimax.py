"""MiniMax: after a left-padded prompt, `generate` attends to the pads.

The mask of a step is made for the keys of layer 0, which is linear and holds none: it has one column. Right are the tokens of
the prompt without pads. Exits with 1 while the fault is there.
"""

import torch
from plain import GREEDY, ids, judge, make

CELLS = {"left padding": ("minimax",)}

if __name__ == "__main__":
    model, text = make("minimax"), ids(1, 20)
    padded, mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), text], 1), torch.tensor([[0] * 5 + [1] * 20])
    found = model.generate(padded, attention_mask=mask, max_new_tokens=2, **GREEDY)
    right = model.generate(text, attention_mask=mask[:, 5:], max_new_tokens=2, **GREEDY)
    judge("the second new token differs", {"minimax": (found.logits[1] - right.logits[1]).abs().max().item()})
