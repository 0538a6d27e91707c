"""A second turn of `generate` on the cache that the first returned is the conversation read from its start."""

import torch

from surgery.checking.law import CACHES, Law, Subject

PROMPT, NEW, QUESTION = 20, 3, 7


def cases(s: Subject):
    def run():
        first = s.generate(s.ids[:1, :PROMPT], NEW)
        cache = next((first[name] for name in CACHES if first.get(name) is not None), None)
        talk = torch.cat([first.sequences, s.ids[1:2, :QUESTION]], 1)
        second = s.generate(talk, NEW, **{s.cache_name: cache})
        return torch.stack(second.logits, 1), s.logits(second.sequences)[:, talk.shape[1] - 1 : -1]

    return {"the conversation and the cache": run}


LAW = Law(
    "second turn on a returned cache",
    "in a chat the earlier turns are read twice, or from a wrong state",
    "give the whole conversation without the cache",
    cases,
)
