"""A prompt that is padded on the right and then decoded: the pads are in the state.

Attention masks them. Of the mixers beside it, the convolution's last inputs are pads, and the state goes on behind the prompt.
Right is the state of the last token that is there, or a ValueError. Exits with 1 while the fault is there.
"""

import inspect

import torch
from plain import ARCHITECTURES, cache_of, ids, judge, make

CELLS = {"right padding, then decoding": tuple(name for name in ARCHITECTURES if name != "recurrent_gemma")}


def difference(name: str) -> float:
    model, text = make(name), ids(1, 21)
    padded, mask = torch.cat([text[:, :20], torch.zeros(1, 7, dtype=torch.long)], 1), torch.tensor([[1] * 20 + [0] * 7])
    first = model(input_ids=padded, attention_mask=mask, use_cache=True)
    grown = torch.cat([mask, torch.ones(1, 1, dtype=torch.long)], 1)
    named = {"position_ids": torch.tensor([[20]])} if "position_ids" in inspect.signature(model.forward).parameters else {}
    if name not in ("mamba", "falcon_mamba"):  # mask_of_a_step.py: with a mask they do not decode at all
        named["attention_mask"] = grown
    second = model(input_ids=text[:, 20:], use_cache=True, **cache_of(first), **named)
    return (second.logits - model(input_ids=text, use_cache=False).logits[:, 20:]).abs().max().item()


if __name__ == "__main__":
    found = {name: difference(name) for name in CELLS["right padding, then decoding"]}
    judge("the token after a right-padded prompt differs", found)
