"""A row's logits do not depend on the rows beside it."""

from surgery.checking.law import Law, Subject

LENGTH = 40


def cases(s: Subject):
    ids = s.ids[:, :LENGTH]
    return {
        "row 0 of 4": lambda: (s.logits(ids)[:1], s.right[:, :LENGTH]),
        "row 3 of 4": lambda: (s.logits(ids)[3:], s.logits(ids[3:])),
    }


LAW = Law(
    "batch of 1 against 4",
    "answers change with the batch size",
    "run one prompt at a time",
    cases,
)
