"""A prompt that is padded on the right and then continued, by decoding or in one forward: the pads are in the state.

Attention masks them. Of the mixers beside it, the convolution's last inputs are pads, and the state goes on behind the prompt.
Right is the state of the last token that is there, or a ValueError. Exits with 1 while the fault is there.
"""

import inspect

import torch
from plain import ARCHITECTURES, cache_of, ids, judge, make

CELLS = {"right padding": tuple(ARCHITECTURES)}


def difference(name: str) -> float:
    model, text = make(name), ids(1, 21)
    padded = torch.cat([text[:, :20], torch.zeros(1, 7, dtype=torch.long), text[:, 20:]], 1)
    mask = torch.tensor([[1] * 20 + [0] * 7 + [1]])
    has_positions = "position_ids" in inspect.signature(model.forward).parameters
    positions = {"position_ids": mask.cumsum(-1) - 1} if has_positions else {}
    at_once = model(input_ids=padded, attention_mask=mask, use_cache=False, **positions).logits[:, 27:]
    found = [at_once]
    first = model(input_ids=padded[:, :27], attention_mask=mask[:, :27], use_cache=True)
    if cache := cache_of(first):  # RecurrentGemma returns none
        named = {"position_ids": torch.tensor([[20]])} if has_positions else {}
        if name not in ("mamba", "falcon_mamba"):  # mask_of_a_step.py: with a mask they do not decode at all
            named["attention_mask"] = mask
        found.append(model(input_ids=text[:, 20:], use_cache=True, **cache, **named).logits)
    right = model(input_ids=text, use_cache=False).logits[:, 20:]
    return max((each - right).abs().max().item() for each in found)


if __name__ == "__main__":
    found = {name: difference(name) for name in CELLS["right padding"]}
    judge("the token after a right-padded prompt differs", found)
