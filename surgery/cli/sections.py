"""Every setting there is, with its type, its default and what it means: for `surgery settings` and the documentation."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from surgery.pretraining.recipe import PretrainRecipe
from surgery.records.recipe import Recipe
from surgery.records.record import Record
from surgery.records.sections.listing import walk
from surgery.records.sections.section import ABSURD, Section
from surgery.records.site import Site

BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
NAMES = {int: "int", float: "float", str: "str", bool: "bool", Any: "any value", Site: "site"}


class Setting(NamedTuple):
    """key: dotted, as --set takes it. type, default: in words and as YAML; the default is empty where the setting is required
    or a section. meaning: one or more sentences."""

    key: str
    type: str
    default: str
    meaning: str


def sections() -> dict[str, type[Section]]:
    """Every section by its dotted name, in the order of a recipe: "" for the top level, and "pretrain" for the recipe that
    `surgery pretrain` takes. The docstring of a section says what it is for."""
    return {**dict(walk(Recipe)), **dict(walk(PretrainRecipe, "pretrain"))}


def rows(section: str = "") -> list[Setting]:
    """The settings of one section, without those of the sections in it. Raises KeyError for a section that does not exist."""
    kind = sections()[section]
    # A recipe of `surgery pretrain` is a file of its own, whose keys stand at the top level.
    place = "" if section == "pretrain" else section.removeprefix("pretrain.")
    result = []
    for name, field in kind.model_fields.items():
        key, meaning = f"{place}.{name}".lstrip("."), " ".join((field.description or "").split())
        result.append(Setting(key, _type(field.annotation, field.metadata), _default(kind, field), meaning))
    return result


def _type(annotation: Any, metadata: Any = ()) -> str:
    """A type in words: `int >= 1`, `list of str`, `head | layer`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        text = _type(arguments[0], (*arguments[1:], *metadata))
    elif origin in (Union, types.UnionType):
        text = " or ".join(_type(part, metadata) for part in arguments if part is not type(None))
    elif origin is Literal:
        text = " | ".join(map(str, arguments))
    elif origin is tuple:
        of = _type(arguments[0])
        text = f"list of ({of})" if "|" in of else f"list of {of}"
    elif origin is dict:
        text = "mapping" if arguments[1] is Any else f"mapping of {_type(arguments[0])} to {_type(arguments[1])}"
    elif isinstance(annotation, type) and issubclass(annotation, Section):
        text = "section"
    else:
        text = f"{NAMES.get(annotation, str(annotation))} {', '.join(_bounds(metadata))}".strip()
    return text


def _bounds(metadata: Any) -> Iterator[str]:
    flat = (part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item]))
    for part in flat:
        if isinstance(part, annotated_types.Ge | annotated_types.Gt | annotated_types.Le | annotated_types.Lt):
            (name,) = (name for name in BOUNDS if hasattr(part, name))
            if getattr(part, name) not in ABSURD:  # these only keep out what nobody means
                yield f"{BOUNDS[name]} {getattr(part, name)}"


def _default(kind: type[Section], field: FieldInfo) -> str:
    """As YAML on one line."""
    first = {name: other.default for name, other in kind.model_fields.items() if other.default is not PydanticUndefined}
    value = field.get_default(call_default_factory=True, validated_data=first)
    if value is PydanticUndefined or isinstance(value, Section):
        return ""
    return yaml.safe_dump(_plain(value), default_flow_style=True, width=10**6, sort_keys=False).removesuffix("\n...\n").strip()


def _plain(value: Any) -> Any:
    """As it would be written in a recipe: a section without what is at its default."""
    if isinstance(value, Record):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields if name in value.model_fields_set}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return {key: _plain(part) for key, part in value.items()} if isinstance(value, dict) else value
