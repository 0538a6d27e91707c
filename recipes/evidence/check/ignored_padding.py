"""xLSTM and RWKV do not read attention_mask; RecurrentGemma's convolution reads the pads.

Right are the prompt's own logits. Exits with 1 while the fault is there.
"""

import torch
from plain import ids, judge, make

CELLS = {"left padding": ("xlstm", "rwkv", "recurrent_gemma")}


def difference(name: str) -> float:
    model, text = make(name), ids(1, 20)
    padded, mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), text], 1), torch.tensor([[0] * 5 + [1] * 20])
    named = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if name == "recurrent_gemma" else {}
    logits = model(input_ids=padded, attention_mask=mask, use_cache=False, **named).logits[:, 5:]
    return (logits - model(input_ids=text, use_cache=False).logits).abs().max().item()


if __name__ == "__main__":
    judge("behind 5 masked pads a prompt's logits differ", {name: difference(name) for name in CELLS["left padding"]})
