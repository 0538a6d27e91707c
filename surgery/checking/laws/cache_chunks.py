"""A cache that is continued by several tokens at once gives the logits of one forward."""

from functools import partial

from surgery.checking.law import Law, Subject


def cases(s: Subject):
    splits = {"after 20 tokens": [20, 21], "after 1 token": [1, 20], "after fewer tokens than taps": [2, 19]}
    splits |= {"in three pieces": [11, 2, 13]}
    if s.chunk and s.chunk < s.length:
        splits[f"after a chunk of {s.chunk}"] = [s.chunk, s.length - s.chunk]

    def run(sizes, how):
        return s.pieces(s.ids[:1, : sum(sizes)], sizes, **how), s.right[:, : sum(sizes)]

    # All ways where the cache is cut once; elsewhere the fullest and the barest.
    ways = s.ways()
    ends = {way: ways[way] for way in (next(iter(ways)), list(ways)[-1])}
    return {
        f"{split}, {way}": partial(run, sizes, how)
        for split, sizes in splits.items()
        for way, how in (ways if split == "after 20 tokens" else ends).items()
    }


LAW = Law(
    "cache, continued by chunks",
    "chat turns, chunked prefill and speculation after a cache read it wrongly or not at all",
    "continue token by token, or read the whole text again",
    cases,
)
