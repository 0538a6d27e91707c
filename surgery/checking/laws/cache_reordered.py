"""The rows of a cache in another order are the rows' caches."""

import torch

from surgery.checking.law import Law, NotApplicable, Subject


def cases(s: Subject):
    order = torch.tensor([1, 1, 0])

    def run(name: str):
        _, cache = s.step(s.ids[:3, :20], **s.named(0, 20, rows=3, **s.good_way))
        if not hasattr(cache, name):
            raise NotApplicable(f"its cache has no {name}")
        getattr(cache, name)(order)
        tokens = s.ids[order, 20:23]
        found = s.pieces(tokens, [1] * 3, cache=cache, start=20, **s.good_way)
        return found, s.logits(s.ids[order, :23])[:, 20:]

    return {name: lambda name=name: run(name) for name in ("reorder_cache",)}


LAW = Law(
    "cache reordered",
    "beams, and batches from which rows are taken, go on from other rows' states",
    "use_cache=False with beams",
    cases,
)
