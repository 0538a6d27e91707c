"""What the sections of a recipe have in common."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, get_args, get_origin

import pydantic
from pydantic import Field

from surgery.records.record import Record
from surgery.records.renamed import advise, current

# How many of something: no run has more than this, and a number with too many digits is refused instead of waited for.
MOST = 10**9
Count = Annotated[int, Field(ge=1, le=MOST)]


class Section(Record):
    """Part of a recipe. The text below a field says what the setting means: `surgery settings` and the documentation print it.

    section: its place in a recipe ("tune.lora"), by which the old names of its settings are found.
    """

    section: ClassVar[str] = ""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _current(cls, fields: Any) -> Any:
        """The fields by their present names; one value, or several between commas, where a list is wanted."""
        if not isinstance(fields, Mapping):
            return fields
        old: dict[str, str] = {}
        renamed = current(fields, cls.section, old)
        advise(old)
        return {name: _listed(value) if name in cls._lists() else value for name, value in renamed.items()}

    @classmethod
    def _lists(cls) -> set[str]:
        """The fields that hold a list, and do not say themselves how it may be written."""
        own = pydantic.BeforeValidator
        return {
            name
            for name, field in cls.model_fields.items()
            if _is_list(field.annotation) and not any(isinstance(part, own) for part in field.metadata)
        }


def _is_list(annotation: Any) -> bool:
    """Whether values of this type are, or may be, tuples."""
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        return _is_list(kind) and not any(isinstance(part, pydantic.BeforeValidator) for part in metadata)
    return get_origin(annotation) is tuple or (get_origin(annotation) is not dict and any(map(_is_list, get_args(annotation))))


def _listed(value: Any) -> Any:
    """`16` as (16,), `quick,speed` as ("quick", "speed")."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",")) if value.strip() else ()
    return (value,) if isinstance(value, int | float) and not isinstance(value, bool) else value
