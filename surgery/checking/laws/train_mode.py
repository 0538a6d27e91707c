"""A model in train mode computes what it computes in eval mode.

Grafts, which in eval mode alone take a small open share for 0 (plan.closed_below), are compared without that.
"""

from typing import Any

from surgery.checking.law import Law, NotApplicable, Subject


def cases(s: Subject):
    config = s.model.config.to_dict()
    on = (name for name, value in config.items() if isinstance(value, float) and value > 0)
    if drops := sorted(name for name in on if any(word in name for word in ("drop", "jitter", "noise"))):
        raise NotApplicable(f"chance is on: {', '.join(drops)}")

    def run():
        grafts: list[Any] = [module for module in s.model.modules() if getattr(module, "closed_below", 0)]
        shares = [graft.closed_below for graft in grafts]
        try:
            for graft in grafts:
                graft.closed_below = 0.0
            right = s.logits(s.ids[:1]) if grafts else s.right
            s.model.train()
            return s.logits(s.ids[:1]), right
        finally:
            s.model.eval()
            for graft, share in zip(grafts, shares, strict=True):
                graft.closed_below = share

    _ = s.right
    return {"one forward": run}


LAW = Law(
    "train mode",
    "training sees another model than the one that is used",
    "compare losses in eval mode, and train on",
    cases,
)
