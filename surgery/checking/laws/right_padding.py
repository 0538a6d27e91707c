"""Pads behind a prompt, masked, change nothing: neither the prompt's logits, nor those of tokens decoded after it."""

import torch

from surgery.checking.law import PAD, Law, Subject

PROMPT, NEW = 20, 3


def cases(s: Subject):
    pads = 7
    ids = torch.cat([s.ids[:1, :PROMPT], torch.full((1, pads), PAD)], 1)
    ids = torch.cat([ids, s.ids[1:2, : PROMPT + pads]])
    mask = torch.ones_like(ids)
    mask[0, PROMPT:] = 0
    places = (mask.cumsum(-1) - 1).clamp_min(0)

    def named(mask, places):
        return {"attention_mask": mask} | ({"position_ids": places} if s.takes("position_ids") else {})

    def decoding():
        _, cache = s.step(ids, **named(mask, places))
        found = []
        for step in range(NEW):
            grown = torch.cat([mask, torch.ones(2, step + 1, dtype=mask.dtype)], 1)
            at = torch.tensor([[PROMPT + step], [PROMPT + pads + step]])
            token = torch.stack([s.ids[0, PROMPT + step : PROMPT + step + 1], s.ids[1, :1]])
            logits, cache = s.step(token, cache, **named(grown, at))
            found.append(logits[:1])
        return torch.cat(found, 1), s.right[:, PROMPT : PROMPT + NEW]

    return {
        "the prompt": lambda: (s.logits(ids, **named(mask, places))[:1, :PROMPT], s.right[:, :PROMPT]),
        "then decoding": decoding,
    }


LAW = Law(
    "right padding, then decoding",
    "pads behind a shorter prompt enter its state before it is continued",
    "pad on the left",
    cases,
)
