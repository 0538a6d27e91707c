"""A static cache gives the logits of a growing one."""

from surgery.checking.law import Law, Subject

PROMPT, NEW = 20, 4


def cases(s: Subject):
    return {'cache_implementation="static"': lambda: s.continue_by_generate(PROMPT, NEW, cache_implementation="static")}


LAW = Law(
    "static cache",
    "what is compiled for serving answers otherwise",
    "leave cache_implementation out",
    cases,
)
