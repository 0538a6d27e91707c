"""What may run that is neither ours nor transformers'. Decided here, by the person at the command line and nobody else.

Code that comes with a model runs only by --trust-remote-code, which every verb hands to transformers as it is. What follows is
asked for by flags of its own, or in Python by `consenting`: a program (--engine-python), and the code of somebody's tasks
(--trust-task-code). No value in a recipe, a plan, a configuration or a name gives such consent.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Consent:
    """engine_python: the Python of a serving engine's environment. task_code: whether tasks of lm-evaluation-harness that are
    neither ours nor its own may bring code."""

    engine_python: Path | None = None
    task_code: bool = False


_given = [Consent()]


@contextmanager
def consenting(*, engine_python: str | Path | None = None, task_code: bool = False) -> Iterator[None]:
    """For a while, consent to what is named, and to nothing else."""
    _given.append(Consent(None if engine_python is None else Path(engine_python), task_code))
    try:
        yield
    finally:
        _given.pop()


def consent() -> Consent:
    """What was consented to."""
    return _given[-1]
