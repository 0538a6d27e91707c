"""Beam search with a cache, which reorders it, finds the beams that it finds without one."""

from surgery.checking.law import Law, Subject


def cases(s: Subject):
    def run():
        cached, plain = (s.generate(s.ids[:4, :12], 8, num_beams=4, use_cache=use) for use in (True, False))
        if not cached.sequences.equal(plain.sequences):
            return plain.sequences_scores * float("nan"), plain.sequences_scores
        return cached.sequences_scores, plain.sequences_scores

    return {"4 beams": run}


LAW = Law(
    "beam search",
    "beams go on from each other's states",
    "num_beams=1, or use_cache=False",
    cases,
)
