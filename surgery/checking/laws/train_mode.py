"""A model in train mode computes what it computes in eval mode."""

from surgery.checking.law import Law, NotApplicable, Subject


def cases(s: Subject):
    config = s.model.config.to_dict()
    if drops := sorted(name for name, value in config.items() if "dropout" in name and isinstance(value, float) and value > 0):
        raise NotApplicable(f"dropout is on: {', '.join(drops)}")

    def run():
        s.model.train()
        try:
            return s.logits(s.ids[:1]), s.right
        finally:
            s.model.eval()

    _ = s.right
    return {"one forward": run}


LAW = Law(
    "train mode",
    "training sees another model than the one that is used",
    "compare losses in eval mode, and train on",
    cases,
)
