"""A cache with reordered rows continues each row from its own state."""

import torch

from surgery.checking.law import Law, NotApplicable, Subject


def cases(s: Subject):
    order = torch.tensor([1, 1, 0])

    def run():
        _, cache = s.step(s.ids[:3, :20], **s.named(0, 20, rows=3, **s.good_way))
        if not hasattr(cache, "reorder_cache"):
            raise NotApplicable("its cache has no reorder_cache")
        cache.reorder_cache(order)
        found = s.pieces(s.ids[order, 20:23], [1] * 3, cache=cache, start=20, **s.good_way)
        return found, s.logits(s.ids[order, :23])[:, 20:]

    return {"reorder_cache": run}


LAW = Law(
    "cache reordered",
    "beams, and batches from which rows are taken, go on from other rows' states",
    "use_cache=False with beams",
    cases,
)
