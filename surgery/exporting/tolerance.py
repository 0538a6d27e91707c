"""How far two correct computations of one model in float32 may lie apart.

Both round, each in its own order of summing. The difference grows with the size of the logits, and, as independent errors do,
with the root of the number of layers and of the number of tokens that a state or an attention sums over. TIMES is calibrated:
models with 1 to 32 layers lie, after 1 to 1,500 tokens, at most a quarter of the tolerance from their own computation in
float64 (tests/surgery/test_tolerance.py), and a defect lies far outside.
"""

import torch
from torch import Tensor

TIMES = 8.0
LEAST = 3e-5  # where logits are nearly zero, as of a random model, what rounds is larger than they are


def tolerance(logits: Tensor, length: int, layers: int) -> float:
    """Of logits (or log-probabilities made of them) after `length` tokens. logits: those of the live model, of any shape."""
    largest = logits.abs().max().item()
    return LEAST + TIMES * torch.finfo(torch.float32).eps * largest * (1 + length**0.5) * layers**0.5
