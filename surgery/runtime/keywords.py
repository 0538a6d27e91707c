"""A function that is called with a keyword which it does not take says in one line what was meant."""

import difflib
from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, get_args, get_type_hints

from surgery.errors import UserError


def explained(function: Callable) -> Callable:
    """The function, but a keyword that it does not take raises UserError, not TypeError."""
    parameters = signature(function).parameters
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function

    @wraps(function)
    def checked_call(*values: Any, **named: Any) -> Any:
        if unknown := [name for name in named if name not in parameters]:
            raise UserError(f"surgery.{function.__name__} has no keyword '{unknown[0]}'{_meant(function, unknown[0])}")
        return function(*values, **named)

    return checked_call


def _meant(function: Callable, name: str) -> str:
    """A setting of one of its arguments (options=Tune(...)), or what is spelt alike."""
    several = {each.name for each in signature(function).parameters.values() if each.kind is Parameter.VAR_POSITIONAL}
    hints = {keyword: hint for keyword, hint in get_type_hints(function).items() if keyword not in {*several, "return"}}
    for keyword, hint in hints.items():
        for kind in get_args(hint) or (hint,):
            if name in getattr(kind, "model_fields", ()):
                return f"; it is a setting: {keyword}=surgery.{kind.__name__}({name}=...)"
    return alike(name, hints)


def alike(name: str, known: Iterable[str]) -> str:
    """The end of a line about a name that there is not: what is spelt alike, or has these initials (lr: learning_rate); else
    all that there are."""
    names = sorted(known)
    initials = [other for other in names if "".join(part[:1] for part in other.split("_")) == name]
    near = initials or difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
