"""What the sections of a recipe have in common."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pydantic

from surgery.records.record import Record
from surgery.records.renamed import advise, current


class Section(Record):
    """Part of a recipe. The text below a field says what the setting means: `surgery settings` and the documentation print it.

    section: its place in a recipe ("tune.lora"), by which the old names of its settings are found.
    """

    model_config = pydantic.ConfigDict(use_attribute_docstrings=True)
    section: ClassVar[str] = ""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _current(cls, fields: Any) -> Any:
        """The fields by their present names."""
        if not isinstance(fields, Mapping):
            return fields
        old: dict[str, str] = {}
        renamed = current(fields, cls.section, old)
        advise(old)
        return renamed
