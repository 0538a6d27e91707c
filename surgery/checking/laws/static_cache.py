"""A static cache gives the logits of a growing one."""

import torch

from surgery.checking.law import Law, Subject

PROMPT, NEW = 20, 4


def cases(s: Subject):
    def run():
        made = s.generate(s.ids[:1, :PROMPT], NEW, cache_implementation="static")
        return torch.stack(made.logits, 1), s.logits(made.sequences)[:, PROMPT - 1 : -1]

    return {'cache_implementation="static"': run}


LAW = Law(
    "static cache",
    "what is compiled for serving answers otherwise",
    "leave cache_implementation out",
    cases,
)
