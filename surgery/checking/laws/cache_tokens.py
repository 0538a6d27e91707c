"""A cache that is continued token by token gives the logits of one forward, in a batch too."""

from functools import partial

from surgery.checking.law import Law, Subject

PROMPT, LENGTH = 20, 27
STEPS = [PROMPT, *[1] * (LENGTH - PROMPT)]


def cases(s: Subject):
    def run(rows, how):
        right = s.right[:, :LENGTH] if rows == 1 else s.logits(s.ids[:rows, :LENGTH])
        return s.pieces(s.ids[:rows, :LENGTH], STEPS, **how), right

    alone = {way: partial(run, 1, how) for way, how in s.ways().items()}
    return alone | {"2 rows": lambda: run(2, s.good_way)}


LAW = Law(
    "cache, token by token",
    "every token that is generated is computed from a wrong state",
    "generate with use_cache=False",
    cases,
    quick=True,
)
