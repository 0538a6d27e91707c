"""A static cache gives the logits of a growing one."""

from surgery.checking.law import Law, Subject

PROMPT, NEW = 20, 4


def cases(s: Subject):
    def run():
        _ = s.good_way
        return s.continue_by_generate(PROMPT, NEW, cache_implementation="static")

    return {'cache_implementation="static"': run}


LAW = Law(
    "static cache",
    "what is compiled for serving answers otherwise",
    "leave cache_implementation out",
    cases,
)
