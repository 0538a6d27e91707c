"""A cache that is continued token by token gives the logits of one forward, in a batch too."""

from functools import partial

from surgery.checking.law import BY_TOKEN, Law, Subject


def cases(s: Subject):
    def two_rows():
        ids = s.ids[:2, : sum(BY_TOKEN)]
        return s.pieces(ids, BY_TOKEN, **s.good_way), s.logits(ids)

    return {way: partial(s.continue_by_token, way) for way in s.ways()} | {"2 rows": two_rows}


LAW = Law(
    "cache, token by token",
    "every token that is generated is computed from a wrong state",
    "generate with use_cache=False",
    cases,
    quick=True,
)
