"""inputs_embeds give the logits of the ids that they embed."""

from surgery.checking.law import Law, Subject


def cases(s: Subject):
    def embedded(ids):
        with s.precision():
            return s.model.get_input_embeddings()(ids).detach()

    def cached():
        _, cache = s.step(None, inputs_embeds=embedded(s.ids[:1, :20]), **s.named(0, 20, **s.good_way))
        return s.pieces(s.ids[:1, 20:23], [1] * 3, cache=cache, start=20, **s.good_way), s.right[:, 20:23]

    return {"one forward": lambda: (s.logits(None, inputs_embeds=embedded(s.ids[:1])), s.right), "with a cache": cached}


LAW = Law(
    "inputs_embeds",
    "soft prompts, images and other embeddings are read differently from tokens",
    "pass input_ids",
    cases,
)
