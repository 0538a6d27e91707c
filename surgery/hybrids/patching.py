"""Whatever changes a live model from outside is here, and nowhere else: modules that do something else for a while, modules
of another class, and what is noted on a model. Afterwards all is as before, whatever happened, an interrupt included.

A hybrid in an exported folder needs it as well, so it imports nothing of ours.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

# What is noted on a model or a parameter, beside what it holds as a module:
Note = Literal[
    "surgery",  # of a hybrid: its plan and its base (splicing/remembered.py)
    "opened",  # of any model: what load() knows of it, or of its base (splicing/remembered.py)
    "learned",  # of a hybrid: which parameters of its base had a gradient; of such a parameter: whether it had (splice.py)
    "whole",  # of a hybrid with less state: the configuration with all of it, and the tensors that were cut (splice.py)
    "unadapted",  # of a tuned model: the tensors that merged adapters have changed, as they were (tuning/lora.py)
    "base_hooks",  # of a hybrid: accelerate's hooks of its base (models/offloaded.py)
]


def set_note(owner: Any, name: Note, value: Any) -> None:
    """Note something on a model or a parameter. A note survives a deep copy, and no save."""
    vars(owner)[f"_noted_{name}"] = value


def note_of(owner: Any, name: Note, otherwise: Any = None) -> Any:
    return vars(owner).get(f"_noted_{name}", otherwise)


def has_note(owner: Any, name: Note) -> bool:
    return f"_noted_{name}" in vars(owner)


def drop_note(owner: Any, name: Note) -> None:
    vars(owner).pop(f"_noted_{name}", None)


@contextmanager
def replaced(methods: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Give objects other methods: (an object, the method's name) -> what is called instead; a module alone stands for its
    forward. What an object holds itself, as the forward that accelerate's hooks put there, is there again afterwards."""
    named: dict[tuple[Any, str], Callable[..., Any]] = {
        key if isinstance(key, tuple) else (key, "forward"): method for key, method in methods.items()
    }
    own = {(owner, name): vars(owner).get(name) for owner, name in named}
    try:
        for (owner, name), method in named.items():
            vars(owner)[name] = method
        yield
    finally:
        for (owner, name), before in own.items():
            if before is None:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before


@contextmanager
def with_class(module: Any, other: type) -> Iterator[None]:
    """Let a module be of another class, with the same attributes."""
    before = become(module, other)
    try:
        yield
    finally:
        become(module, before)


def become(module: Any, other: type) -> type:
    """As with_class, for good. Returns the class that it had."""
    before = type(module)
    module.__class__ = other
    return before


@contextmanager
def hooked(handles: Callable[[], list[Any]]) -> Iterator[None]:
    """With the hooks of torch that `handles` registers."""
    registered = handles()
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()
