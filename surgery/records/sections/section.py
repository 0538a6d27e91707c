"""What the sections of a recipe have in common."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, dataclass_transform, get_args, get_origin

import pydantic
from pydantic import Field

from surgery.errors import UserError
from surgery.records.reading import check_name, shown
from surgery.records.record import Record, first_line
from surgery.records.sections.gone import gone_of
from surgery.runtime.keywords import alike

# Upper bounds of settings, beyond what any machine does in its life: what asks for more is refused before it is begun. What a
# machine cannot hold though it is within them depends on the model: jobs/preparing.py refuses it, and --dry-run estimates the
# rest.
MOST = 10**9  # of what costs nothing by its size: every so many steps, at most so many
STEPS = 10**7
EXAMPLES = 10**6  # questions are made before they are asked, and take a kilobyte or more each
TOKENS = 2**24  # of one sequence
STEP_TOKENS = 2**26  # of a step of training, or of all windows of a measurement
ROWS = 2**20  # of a batch
WIDTH = 2**14  # of a graft, or the rank of an adapter
REPEATS = 100  # of a whole measurement
FACTOR = 1e6  # of a weight in a loss, a learning rate, a scale
ABSURD = {MOST, STEPS, EXAMPLES, TOKENS, STEP_TOKENS, ROWS, WIDTH, FACTOR, 1 / FACTOR, 2**60}
# Names a file, a folder or a model.
Name = Annotated[str, pydantic.AfterValidator(check_name)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Steps = Annotated[int, Field(ge=1, le=STEPS)]
Examples = Annotated[int, Field(ge=1, le=EXAMPLES)]
Rows = Annotated[int, Field(ge=1, le=ROWS)]
Width = Annotated[int, Field(ge=1, le=WIDTH)]
Tokens = Annotated[int, Field(ge=1, le=TOKENS)]
Repeats = Annotated[int, Field(ge=1, le=REPEATS)]


def check_weights(weights: Iterable[float]) -> None:
    """Raise ValueError where weights that something is drawn by cannot be added up."""
    if not math.isfinite(sum(weights)):
        raise ValueError("weight: these weights add up to infinity; give smaller ones")


def check_tokens(**factors: int) -> None:
    """Raise ValueError where the product of some settings is more tokens than STEP_TOKENS."""
    if math.prod(factors.values()) > STEP_TOKENS:
        name = next(iter(factors))
        raise ValueError(
            f"{name}: {' times '.join(factors)} is {math.prod(factors.values()):,} tokens; at most {STEP_TOKENS:,} are taken"
        )


def none_for_no(value: Any) -> Any:
    """accelerate's `no`, which YAML reads as false."""
    return None if value is False or value == "no" else value


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(Record)


class SettingsError(UserError, ValueError):
    """Settings, given in Python, that do not fit; in one line."""


@dataclass_transform(kw_only_default=True, field_specifiers=(Field,))
class _Settings(ModelMetaclass):
    """What is called as Tune(...), and not read from a recipe, says in one line what does not fit, and what was meant."""

    def __call__(cls: Any, *values: Any, **named: Any) -> Any:
        place = f"surgery.{cls.__name__}"
        if unknown := [name for name in named if name not in cls.model_fields and name not in gone_of(cls.section)]:
            raise SettingsError(f"{place} has no setting '{unknown[0]}'{alike(unknown[0], cls.model_fields)}")
        try:
            return super().__call__(*values, **named)
        except pydantic.ValidationError as error:
            raise SettingsError(f"{place}: {first_line(error)}") from error


class Section(Record, metaclass=_Settings):
    """Part of a recipe. The text below a field says what the setting means: `surgery settings` and the documentation print it.

    section: its place in a recipe ("tune.lora")."""

    section: ClassVar[str] = ""

    @classmethod
    def of(cls, given: Any, fields: Mapping[str, Any], verb: str) -> Self:
        """The settings of a public function: the record that was given, or one of single fields, or their defaults. verb: the
        function's name, for the message. Raises UserError for both, for anything else, and for a field that does not fit."""
        if unknown := [name for name in fields if name not in cls.model_fields and name not in gone_of(cls.section)]:
            raise UserError(f"surgery.{verb} has no keyword '{unknown[0]}'{alike(unknown[0], cls.model_fields)}")
        if isinstance(given, cls) and not fields:
            return given
        if given is not None:
            what = "both" if isinstance(given, cls) else shown(repr(given), 40)
            raise UserError(f"surgery.{verb} takes surgery.{cls.__name__}(...), or its settings by name, not {what}")
        try:
            return cls.model_validate(fields)
        except pydantic.ValidationError as error:
            raise UserError(f"{verb}: {first_line(error)}") from error

    @pydantic.model_validator(mode="before")
    @classmethod
    def _present(cls, fields: Any) -> Any:
        """The fields that there still are; one value, or several between commas, where a list is wanted."""
        if not isinstance(fields, Mapping):
            return fields
        gone = gone_of(cls.section)
        for name in gone.keys() & fields.keys():
            value, about = fields[name], gone[name]
            if (list(value) if isinstance(value, tuple) else value) == about.default:
                continue
            if not about.heir:
                raise ValueError(f"{name}: went with version {about.version}: {about.instead}")
            if fields.get(about.heir) in (None, True):
                fields = {**fields, about.heir: value}
        lists = cls._lists()
        return {name: _listed(value) if name in lists else value for name, value in fields.items() if name not in gone}

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
