"""What is said of a recipe that does not fit: one line, with the key, the value, and what may have been meant."""

import difflib
from collections.abc import Iterable
from typing import Any

import pydantic

from surgery.records.reading import shown
from surgery.records.record import complaint_line
from surgery.records.sections.gone import gone_of
from surgery.records.sections.listing import keys, section_of
from surgery.records.sections.section import Section

# pydantic's type of error -> what the setting takes.
TAKES = {
    "int_parsing": "a whole number", "int_type": "a whole number", "int_from_float": "a whole number",
    "int_parsing_size": "a whole number with fewer digits", "float_parsing": "a number", "float_type": "a number",
    "bool_parsing": "true or false", "bool_type": "true or false", "string_type": "text", "finite_number": "a finite number",
    "tuple_type": "a list, e.g. [a, b]", "dict_type": "keys and values, e.g. {key: value}",
    "model_type": "keys and values ({} for its defaults)", "model_attributes_type": "keys and values ({} for its defaults)",
}  # fmt: skip


def complaint(error: pydantic.ValidationError, root: type[Section]) -> str:
    """The first complaint of a validation error."""
    detail = _first(error)
    kind, value, line = detail["type"], detail["input"], complaint_line(detail)
    name = ".".join(map(str, detail["loc"]))
    given = f", not {_short(value)}"
    if words := _words_beside(error, detail):  # a number or a word: pydantic names the kind of number behind the key
        line = line.replace(name, name.rpartition(".")[0], 1)
        name = name.rpartition(".")[0]
        given = f" or {words}{given}" if kind in TAKES else given
    if kind == "extra_forbidden":
        return line if "; a space" in line else line + meant(root, tuple(detail["loc"]))
    if kind in TAKES:
        return f"{name} takes {TAKES[kind]}{given}"
    if kind == "literal_error":
        options = detail["ctx"]["expected"]
        near = difflib.get_close_matches(str(value), options.replace(" or ", ", ").replace("'", "").split(", "), n=1)
        return f"{name} takes {options}{given}" + (f"; did you mean {near[0]}?" if near else "")
    if kind == "missing":
        line = f"{name} is missing"
    elif kind == "value_error":
        line = _with_key(line, name, root, detail["loc"])
    elif isinstance(value, str | int | float):
        line = line.replace("Input should be", "must be") + given
    return line


def place_of(error: pydantic.ValidationError) -> str:
    """The dotted key that complaint() is about; "" for the whole."""
    return ".".join(map(str, _first(error)["loc"]))


def _first(error: pydantic.ValidationError) -> Any:
    """A misspelt key comes first: what is missing may be what it was meant to be."""
    details = error.errors()
    return next((detail for detail in details if detail["type"] == "extra_forbidden"), details[0])


def _words_beside(error: pydantic.ValidationError, detail: Any) -> str:
    """The words that a setting takes beside what a complaint is about: 'auto'; empty where it takes none."""
    place = detail["loc"][:-1]
    others = (other for other in error.errors() if other["loc"][:-1] == place and other["loc"] != detail["loc"])
    words = (other for other in others if str(other["loc"][-1]).startswith("literal["))
    return next((str(other["ctx"]["expected"]) for other in words), "")


def _with_key(line: str, name: str, root: type[Section], place: tuple[Any, ...]) -> str:
    """`plan: blend: means nothing` as `plan.blend: means nothing`."""
    section = section_of(root, place)[1]
    key, colon, rest = line.removeprefix(f"{name}: ").partition(": ")
    return (
        f"{name}.{key}: {rest}".lstrip(".")
        if colon and section and key in {*section.model_fields, *gone_of(section.section)}
        else line
    )


def meant(root: type[Section], place: tuple[Any, ...]) -> str:
    """The end of a line about an unknown key: what may have been meant, or where the keys are listed."""
    *parents, last = place
    known, (name, section) = keys(root), section_of(root, tuple(parents))
    if section is not None and (advice := named_like(f"{name}.{last}".lstrip("."), known)):
        return advice
    listed = name if root.section == "" else root.section
    return f"; `{' '.join(('surgery settings', *listed.split()))}` lists the keys"


def named_like(name: str, known: Iterable[str]) -> str:
    """What a dotted key that does not exist may have meant, as the end of a line, or nothing: the same in lower case, else what
    ends alike, else what is spelt alike in the same section. known: every key."""
    section, _, last = name.lower().rpartition(".")
    leaves = {key: key.rpartition(".")[2] for key in known}
    near = [key for key in known if key == name.lower()] or [key for key, leaf in leaves.items() if leaf == last]
    if not near:
        siblings = {leaf: key for key, leaf in leaves.items() if key.rpartition(".")[0] == section}
        near = [siblings[leaf] for leaf in difflib.get_close_matches(last, siblings, n=1, cutoff=0.7)]
    return f"; did you mean {_either(list(dict.fromkeys(near))[:3])}?" if near else ""


def none_named(what: str, name: str, names: Iterable[str]) -> str:
    """A line for a name that does not exist: the nearest one, or all."""
    known = sorted(names)
    near = difflib.get_close_matches(name, known, n=1)
    return f"no {what} is named '{name}'; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _short(value: Any) -> str:
    return "nothing" if value is None else shown(repr(value) if isinstance(value, str) else value, 59)
