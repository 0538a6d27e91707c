"""Pads behind a prompt, masked, change neither the prompt's logits nor those of the tokens behind the pads."""

import torch

from surgery.checking.law import PAD, Law, Subject

PROMPT, PADS, NEW = 20, 7, 3
READ = PROMPT + PADS


def cases(s: Subject):
    text = s.ids[:1, : PROMPT + NEW]
    padded = torch.cat([text[:, :PROMPT], torch.full((1, PADS), PAD), text[:, PROMPT:]], 1)
    ids = torch.cat([padded, s.ids[1:2, : READ + NEW]])
    mask = torch.ones_like(ids)
    mask[0, PROMPT:READ] = 0

    def named(begin: int, end: int):
        positions = {"position_ids": (mask.cumsum(-1) - 1)[:, begin:end]} if s.takes("position_ids") else {}
        return {"attention_mask": mask[:, :end]} | positions

    def decoding():
        _, cache = s.step(ids[:, :READ], **named(0, READ))
        found = []
        for at in range(READ, READ + NEW):
            logits, cache = s.step(ids[:, at : at + 1], cache, **named(at, at + 1))
            found.append(logits[:1])
        return torch.cat(found, 1), s.right[:, PROMPT : PROMPT + NEW]

    return {
        "the prompt": lambda: (s.logits(ids[:, :READ], **named(0, READ))[:1, :PROMPT], s.right[:, :PROMPT]),
        "then decoding": decoding,
        "then more in one forward": lambda: (
            s.logits(ids, **named(0, READ + NEW))[:1, READ:],
            s.right[:, PROMPT : PROMPT + NEW],
        ),
    }


LAW = Law(
    "right padding",
    "pads behind a shorter prompt, or between turns, enter the state that is continued",
    "pad on the left, and join turns before they are padded",
    cases,
)
