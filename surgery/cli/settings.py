"""surgery settings, surgery list: what can be set, and the names that settings take."""

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgery.cli.console import show
from surgery.errors import UserError

if TYPE_CHECKING:
    from surgery.cli.sections import Setting

Names = Iterator[tuple[str, str]]  # name, meaning


def settings(
    section: Annotated[str, typer.Argument(help="A section (tune, tune.lora, ...) or a key (tune.steps).")] = "",
) -> None:
    """List the settings of a recipe.

    Every key with its type, its default and what it means.

    Examples:
      surgery settings tune.lora
    """
    from surgery.cli.sections import rows, sections
    from surgery.records.complaints import named_like
    from surgery.records.recipe import Recipe
    from surgery.records.sections.listing import keys

    known = sections()
    chosen = [place for place in known if not section or place == section or place.startswith(f"{section}.")]
    if not chosen:
        settings = {row.key: row for place in known for row in rows(place)}
        if section not in settings:
            advice = named_like(section, {*known, *settings, *keys(Recipe)})
            raise UserError(
                f"there is no section or key '{section}'" + (advice or f"; the sections are {', '.join(filter(None, known))}")
            )
        show("\n".join(_setting(settings[section])))
        return
    for place in chosen:
        title = place or "a recipe, top level"
        show("\n".join([title, *_wrapped(" ".join((known[place].__doc__ or "").split()), 2), ""]))
        for row in rows(place):
            show("\n".join([*_setting(row), ""]))


def _setting(row: "Setting") -> list[str]:
    default = f"default {row.default}" if row.default else "" if row.type == "section" else "required"
    return [*_wrapped(f"{row.key}  [{'; '.join(filter(None, (row.type, default)))}]", 2, 6), *_wrapped(row.meaning, 6)]


def _wrapped(text: str, indent: int, further: int | None = None) -> list[str]:
    width = min(100, shutil.get_terminal_size().columns)
    first, later = " " * indent, " " * (indent if further is None else further)
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def list_names(
    kind: Annotated[str, typer.Argument(help="probes, suites, tasks, ways, families, formats, studies or kernels.")],
) -> None:
    """List the names that settings and options take.

    Each with what it means.

    Examples:
      surgery list probes
    """
    if kind not in KINDS:
        from surgery.records.complaints import none_named

        raise UserError(none_named("list", kind, KINDS))
    names = list(KINDS[kind]())
    column = max(len(name) for name, _ in names) + 2
    for name, meaning in names:
        lines = _wrapped(meaning, column)
        lines[0] = f"{name:<{column}}{lines[0][column:]}"
        show("\n".join(lines))


def _probes() -> Names:
    from dataclasses import MISSING, fields

    from surgery.probes import probes

    for name, kind in sorted(probes().items()):
        own = [field for field in fields(kind) if field.name not in ("tokenizer", "part")]  # the toolkit gives these
        options = (field.name if field.default is MISSING else f"{field.name}={field.default}" for field in own)
        yield name, f"{_first_sentence(kind.__doc__ or '')} Options: {', '.join(options)}."


def _suites() -> Names:
    from surgery.records.sections.benching import SUITES

    yield from SUITES.items()


def _tasks() -> Names:
    import yaml

    from surgery.more import TASKS

    for path in sorted(TASKS.glob("*.yaml")):
        if "metadata" in (text := path.read_text()) and "probe:" in text:
            metadata = yaml.safe_load(text)["metadata"]
            options = ", ".join(f"{option} {value}" for option, value in metadata["options"].items())
            yield path.stem, f"The probe {metadata['probe']}, {options}."
        else:
            yield path.stem, _first_sentence(" ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#")))
    yield "...", "And every task of lm-evaluation-harness: `lm-eval ls tasks` lists them."


def _families() -> Names:
    from surgery.families import families

    for name, family in families().items():
        if name == family.model_type:
            yield name, _first_sentence(_file_of(family))


def _formats() -> Names:
    from surgery.exporting.formats import descriptions

    yield from descriptions().items()


def _ways() -> Names:
    from surgery.choosing import names, way_of

    for name in names():
        yield name, _first_sentence(way_of(name).__doc__ or "")


def _studies() -> Names:
    from surgery.studies import studies

    for name, study in studies().items():
        options = ", ".join(study.model_fields)
        yield name, f"{study.title}." + (f" Options: {options}." if options else "")


def _kernels() -> Names:
    from surgery.kernels.operations import operations

    for name, operation in operations().items():
        yield name, f"Backends, the preferred one first: {', '.join(operation.backends)}."


KINDS: dict[str, Callable[[], Names]] = {
    "probes": _probes, "suites": _suites, "tasks": _tasks, "families": _families, "formats": _formats, "ways": _ways,
    "studies": _studies, "kernels": _kernels,
}  # fmt: skip


def _file_of(family: Any) -> str:
    """The docstring of the module that defines a family."""
    return next(
        (module.__doc__ or "" for module in list(sys.modules.values()) if getattr(module, "FAMILY", None) is family), ""
    )


def _first_sentence(text: str) -> str:
    """Of a docstring, up to the first stop that ends a sentence."""
    whole = " ".join(text.split("\n\n", maxsplit=1)[0].split())
    head, stop, _ = whole.partition(". ")
    return head + "." if stop else whole
