"""surgery list"""

import shutil
import sys
import textwrap
from typing import Annotated, Any

import typer

from surgery.errors import UserError
from surgery.runtime.listing import PACKAGE, list_modules, list_table
from surgery.runtime.progress import show

KINDS = ("settings", "probes", "suites", "controls", "families", "formats", "laws", "recipes")


def list_names(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=", ".join(KINDS))] = "",
    under: Annotated[str, typer.Argument(metavar="SECTION", help="For settings: a section, such as tune.")] = "",
) -> None:
    """List the names that settings and commands take, each with one line about it.

    Examples:
      surgery list probes
      surgery list settings tune
    """
    if kind not in KINDS:
        raise UserError(f"surgery list takes one of {', '.join(KINDS)}" + (f", not '{kind}'" if kind else ""))
    rows = [(name, about) for name, about in _names(kind).items() if name.startswith(under)]
    if not rows:
        raise UserError(f"there are no {kind} under '{under}'" if under else f"there are no {kind} here; a git clone has them")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    indent = max(len(name) for name, _ in rows) + 2
    for name, about in rows:
        show(
            textwrap.fill(about, max(width, indent + 30), initial_indent=name.ljust(indent), subsequent_indent=" " * indent)
            or name
        )


def _names(kind: str) -> dict[str, str]:
    if kind == "settings":
        from surgery.records.recipe import list_settings

        return {key: f"{_default(field)} {' '.join((field.description or '').split())}" for key, field in list_settings()}
    if kind == "recipes":
        folder = PACKAGE.parent / "recipes"
        heads = {path.stem: path.read_text(encoding="utf-8").partition("\n")[0] for path in sorted(folder.glob("*.yaml"))}
        return {name: head.lstrip("# ") for name, head in heads.items()}
    if kind == "formats":
        return list_table("exporting/export.py", "FORMATS")
    if kind in ("suites", "controls"):
        return list_table(f"evaluation/{kind}.py", kind.upper())
    places = {"probes": ("probes", "PROBE"), "families": ("modeling", "FAMILY"), "laws": ("checking/laws", "LAW")}
    return list_modules(*places[kind])


def _default(field: Any) -> str:
    """What a setting is where it is not set: "[150]"."""
    if field.is_required():
        return "[required]"
    value = field.default if field.default_factory is None else "as described"
    if isinstance(value, tuple):
        value = ", ".join(map(str, value)) or "none"
    return f"[{'none' if value is None else value}]" if not isinstance(value, dict) else "[{}]"
