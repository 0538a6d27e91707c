"""What guessing gives on the tasks of the project's own probes."""

from functools import cache
from typing import Any

from surgery.evaluation.asking import WRITTEN, sized_options
from surgery.evaluation.results import NEEDLES
from surgery.evaluation.suites import families
from surgery.probes import make, probes
from surgery.probes.needle import CHOICES
from surgery.probes.question import CompletionProbe


@cache
def chance(task: str) -> float | None:
    """The accuracy of a guess among a question's choices, 0 where the answer is written; None for a task whose choices are not
    known from its name (facts of a file, the harness's tasks). task: as a report names it, kv.32 say."""
    name, _, size = task.partition(".")
    name = "kv" if name == "kv_unseen" else name
    if name == "needle" or name in NEEDLES:
        return 1 / CHOICES
    guess = 0.0 if name in WRITTEN else getattr(families().get(name), "guess", None)
    if guess is not None:
        return guess
    if name not in probes() or not size.isdigit():
        return None
    if (options := sized_options(name, int(size))) is None:
        return None
    probe: Any = make(name, **options)
    if isinstance(probe, CompletionProbe):
        return 0.0
    return probe.questions(1, 0)[0].chance
