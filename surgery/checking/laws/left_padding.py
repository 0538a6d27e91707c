"""Pads before a prompt, masked, change nothing: neither the logits of one forward, nor what is generated."""

import torch

from surgery.checking.law import PAD, Law, Subject

PADS = 5


def cases(s: Subject):
    row, other = s.ids[:1], torch.cat([s.ids[1:2], s.ids[2:3, :PADS]], 1)
    ids = torch.cat([torch.cat([torch.full((1, PADS), PAD), row], 1), other])
    mask = torch.ones_like(ids)
    mask[0, :PADS] = 0
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)} if s.takes("position_ids") else {}

    def forward(rows: int):
        named = {name: value[:rows] for name, value in positions.items()}
        return s.logits(ids[:rows], attention_mask=mask[:rows], **named)[:1, PADS:], s.right

    def generate():
        padded = s.generate(ids[:, :24], attention_mask=mask[:, :24])
        alone = s.generate(ids[:1, PADS:24], attention_mask=mask[:1, PADS:24])
        return torch.stack(padded.logits, 1)[:1], torch.stack(alone.logits, 1)

    return {"alone": lambda: forward(1), "beside a longer row": lambda: forward(2), "in generate": generate}


LAW = Law(
    "left padding",
    "padded prompts are answered differently in a batch than alone",
    "put only prompts of equal length in a batch",
    cases,
)
