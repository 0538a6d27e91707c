"""`generate` gives the tokens, and their logits, of a loop without a cache."""

import torch

from surgery.checking.law import Law, Subject

PROMPT, NEW = 20, 5


def cases(s: Subject):
    def run(cached: bool):
        made = s.generate(s.ids[:1, :PROMPT], NEW, use_cache=cached)
        return torch.stack(made.logits, 1), s.logits(made.sequences)[:, PROMPT - 1 : -1]

    return {"with a cache": lambda: run(True), "use_cache=False": lambda: run(False)}


LAW = Law(
    "generate against no cache",
    "generated text is not what the model would say",
    "generate with use_cache=False",
    cases,
    quick=True,
)
