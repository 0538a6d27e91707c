"""A cache that is continued token by token gives the logits of one forward, in a batch too."""

from functools import partial

from surgery.checking.law import BY_TOKEN, Law, NotApplicable, Subject


def cases(s: Subject):
    ids = s.ids[:2, : sum(BY_TOKEN)]
    alone = {way: partial(s.continue_by_token, way) for way in s.ways()}

    def long():
        """Beyond the second chunk of a scan; where the configuration names none, of one of 64 tokens."""
        prompt = 2 * min(max(s.chunk or 0, 64), 256) + 22
        most = getattr(s.model.config.get_text_config(decoder=True), "max_position_embeddings", None) or prompt + 3
        if most < prompt + 3:
            raise NotApplicable(f"it has {most} positions")
        text = s.draw(prompt + 3)
        return s.pieces(text, [prompt, 1, 1, 1], **s.good_way), s.logits(text)

    return alone | {"2 rows": lambda: (s.pieces(ids, BY_TOKEN, **s.good_way), s.logits(ids)), "after a long prompt": long}


LAW = Law(
    "cache, token by token",
    "every token that is generated is computed from a wrong state",
    "generate with use_cache=False",
    cases,
)
