"""A second turn of `generate` on the cache that the first returned is the conversation read from its start."""

import torch

from surgery.checking.law import Law, Subject
from surgery.models.anatomy import find_cache

PROMPT, NEW, QUESTION = 20, 3, 7


def cases(s: Subject):
    def run(with_earlier_turns: bool):
        first = s.generate(s.ids[:1, :PROMPT], NEW)
        _, cache = find_cache(first)
        talk = torch.cat([first.sequences, s.ids[1:2, :QUESTION]], 1)
        seen = 0 if with_earlier_turns else first.sequences.shape[1] - 1  # the last token was not read any more
        mask = torch.ones_like(talk)
        second = s.generate(talk[:, seen:], NEW, attention_mask=mask, **{s.cache_name: cache})
        made = torch.cat([talk[:, :seen], second.sequences], 1)
        return torch.stack(second.logits, 1), s.logits(made)[:, talk.shape[1] - 1 : -1]

    return {"the conversation and the cache": lambda: run(True), "the new tokens, a mask and the cache": lambda: run(False)}


LAW = Law(
    "second turn on a returned cache",
    "in a chat the earlier turns are read twice, or from a wrong state",
    "give the whole conversation without the cache",
    cases,
)
