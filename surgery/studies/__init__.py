"""Studies: the figures and tables of arXiv 2504.18574 as runs (recipes/paper).

Each study is one file of this folder that defines `STUDY`, a Record whose fields are the study's options. The folder is listed,
so a new file is a new study; nothing has to be registered."""

import importlib
import pkgutil
from functools import cache
from typing import Any

import pydantic

from surgery.errors import UserError
from surgery.records.complaints import none_named
from surgery.records.record import first_line
from surgery.studies.study import Findings, Study, Subjects

__all__ = ["Findings", "Study", "Subjects", "make", "studies"]


@cache
def studies() -> dict[str, type[Study]]:
    """name -> the Record of the study's options."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return {module.__name__.rpartition(".")[2]: module.STUDY for module in modules if hasattr(module, "STUDY")}


def make(name: str, **options: Any) -> Study:
    """The study of that name with these options. Raises UserError for an unknown name, an unknown option or a wrong value."""
    if name not in studies():
        raise UserError(none_named("study", name, studies()))
    known = studies()[name].model_fields
    if unknown := sorted(set(options) - set(known)):
        raise UserError(f"the study '{name}' has no option '{unknown[0]}'; its options are {', '.join(known) or 'none'}")
    try:
        return studies()[name](**options)
    except pydantic.ValidationError as error:
        raise UserError(f"the study '{name}': {first_line(error)}") from error
