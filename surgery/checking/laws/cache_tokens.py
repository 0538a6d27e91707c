"""A cache that is continued token by token gives the logits of one forward, in a batch too."""

from functools import partial

from surgery.checking.law import BY_TOKEN, Law, Subject


def cases(s: Subject):
    ids = s.ids[:2, : sum(BY_TOKEN)]
    alone = {way: partial(s.continue_by_token, way) for way in s.ways()}
    return alone | {"2 rows": lambda: (s.pieces(ids, BY_TOKEN, **s.good_way), s.logits(ids))}


LAW = Law(
    "cache, token by token",
    "every token that is generated is computed from a wrong state",
    "generate with use_cache=False",
    cases,
)
