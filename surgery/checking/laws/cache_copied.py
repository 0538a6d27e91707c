"""A copy of a cache is independent of it: what is read into one is not in the other."""

import copy

from surgery.checking.law import Law, Subject


def cases(s: Subject):
    def run(which: str):
        _, cache = s.step(s.ids[:1, :20], **s.named(0, 20, **s.good_way))
        other = copy.deepcopy(cache)
        first, second = (cache, other) if which == "the copy" else (other, cache)
        s.pieces(s.ids[1:2, :3], [1] * 3, cache=first, start=20, **s.good_way)
        return s.pieces(s.ids[:1, 20:24], [1] * 4, cache=second, start=20, **s.good_way), s.right[:, 20:24]

    return {which: lambda which=which: run(which) for which in ("the copy", "the original")}


LAW = Law(
    "cache copied",
    "answers that go on from one cache in several ways change each other",
    "read the prompt again for each of them",
    cases,
)
