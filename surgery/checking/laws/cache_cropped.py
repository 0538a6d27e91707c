"""A cache from which the last tokens are cut is the cache before them, or says that it cannot be."""

from surgery.checking.law import Law, NotApplicable, Subject


def cases(s: Subject):
    def run(ask_first: bool):
        _, cache = s.step(s.ids[:1, :20], **s.named(0, 20, **s.good_way))
        if not hasattr(cache, "crop"):
            raise NotApplicable("its cache has no crop")
        if ask_first:
            if not getattr(cache, "is_croppable", True):
                raise ValueError("cache.is_croppable is False: it cannot be cropped")
            if hasattr(cache, "activate_past_recording"):
                cache.activate_past_recording()
        s.pieces(s.ids[1:2, :3], [1] * 3, cache=cache, start=20, **s.good_way)
        cache.crop(-3)
        return s.pieces(s.ids[:1, 20:24], [1] * 4, cache=cache, start=20, **s.good_way), s.right[:, 20:24]

    return {"as is_croppable says": lambda: run(True), "crop(-3)": lambda: run(False)}


LAW = Law(
    "cache cropped",
    "speculative decoding and edited chats go on from tokens that were taken back",
    "read the text again up to the cut",
    cases,
)
