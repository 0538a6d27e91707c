"""`generate` gives the tokens, and their logits, of a loop without a cache."""

from surgery.checking.law import Law, Subject

PROMPT, NEW = 20, 5


def cases(s: Subject):
    return {
        "with a cache": lambda: s.continue_by_generate(PROMPT, NEW),
        "use_cache=False": lambda: s.continue_by_generate(PROMPT, NEW, use_cache=False),
    }


LAW = Law(
    "generate against no cache",
    "generated text is not what the model would say",
    "generate with use_cache=False",
    cases,
)
