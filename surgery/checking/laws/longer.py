"""Beyond the length of training, logits are finite, and a token's are those of the shorter text that ends there."""

from surgery.checking.law import Law, NotApplicable, Subject

LONGEST = 1024


def cases(s: Subject):
    config = s.model.config
    names = ("max_position_embeddings", "context_length", "model_max_length")
    trained = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    if trained is None:
        raise NotApplicable("its configuration names no length")
    if trained > LONGEST:
        raise NotApplicable(
            f"its length of {trained} tokens is too long to be tried here; --architecture tries it on a small one"
        )
    ids = s.draw(trained + 21)
    return {f"{trained + 21} tokens, {trained} trained": lambda: (s.logits(ids)[:, :-10], s.logits(ids[:, :-10]))}


LAW = Law(
    "longer than the training length",
    "long texts end in NaN, or in an error",
    "keep texts within the length of training",
    cases,
)
