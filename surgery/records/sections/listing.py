"""The sections within a section, by their places: for the list of all settings and the advice on a misspelt key."""

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, get_args, get_origin

from surgery.records.sections.section import Section


def inner(annotation: Any) -> type[Section] | None:
    """The section that a field of this type holds, or a list of."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    parts = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return next((section for part in parts if (section := inner(part)) is not None), None)


def walk(section: type[Section], place: str = "") -> Iterator[tuple[str, type[Section]]]:
    """(place, section) of a section and of those in it: ("tune", Tune), ("tune.lora", Lora), ..."""
    yield place, section
    for name, field in section.model_fields.items():
        if (part := inner(field.annotation)) is not None:
            yield from walk(part, f"{place}.{name}".lstrip("."))


@cache
def keys(root: type[Section]) -> tuple[str, ...]:
    """All dotted keys."""
    return tuple(f"{place}.{name}".lstrip(".") for place, section in walk(root) for name in section.model_fields)


def section_of(root: type[Section], place: tuple[str | int, ...]) -> tuple[str, type[Section] | None]:
    """The dotted name of what lies at a place of a tree, and its section; None where it has none (a mapping of the user's)."""
    name, section = "", root
    for part in place:
        if isinstance(part, int):  # of a list
            continue
        name = f"{name}.{part}".lstrip(".")
        field = section.model_fields.get(part)
        held = None if field is None else inner(field.annotation)
        if held is None:
            return name, None
        section = held
    return name, section
