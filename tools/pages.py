"""Fills docs/commands.md from the command line's own help, and docs/settings.md from the settings of a recipe.

    python tools/pages.py            # writes both
    python tools/pages.py --check    # exits with 1 if one of them is stale

tests/docs/test_pages.py runs the check.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import typer.main

from surgery.cli.app import GROUPS, app
from surgery.cli.list import _default
from surgery.records.recipe import list_settings

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 100  # characters of a line of help
COMMANDS = """\
# Commands

<!-- written by tools/pages.py from the help of each command -->

`surgery COMMAND --help` prints the same. Exit status: 0 done; 1 declined, or a skill lost (`run`), a fault (`check`),
`--require` not met (`bench`); 2 an input cannot be used, and the line on standard error says why; 130 interrupted.
"""
SETTINGS = """\
# Settings

<!-- written by tools/pages.py from surgery/records/recipe.py -->

A recipe is a YAML file with these keys. `--set KEY=VALUE` changes one of them, with dotted keys and values in YAML
(`--set bench.pairs=[16,64]`). A list may also be written with commas. `surgery list settings` prints this table;
`surgery list settings tune` one section of it.

`tune.examples` is a list of entries with the keys below; by default it has one, dictionaries of 4 to 64 pairs. `tune.hints` and
`tune.lora` are off unless the section is there (`tune.hints={}`).
"""
SECTIONS = {"": "A run", "data": "data", "locate": "locate", "plan": "plan", "tune": "tune", "bench": "bench"}


def command_pages() -> str:
    """docs/commands.md: for every command, in the order of use, what its --help prints."""
    group: Any = typer.main.get_command(app)
    parts = [COMMANDS]
    for title, verbs in GROUPS.items():
        parts.append(f"## {title}\n")
        for name in verbs:
            parts.append(f"### {name}\n\n```text\n{command_help(group, name)}\n```\n")
    return "\n".join(parts)


def command_help(group: Any, name: str) -> str:
    """What `surgery NAME --help` prints, in lines of WIDTH characters."""
    command = group.commands[name]
    # A context of the group around it, or the usage would not begin with `surgery`.
    parent = group.context_class(group, info_name="surgery", terminal_width=WIDTH, help_option_names=["-h", "--help"])
    context = command.context_class(
        command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH, **command.context_settings
    )
    lines = command.get_help(context).strip().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def settings_page() -> str:
    """docs/settings.md: every setting with its default and what it means, by section."""
    rows: dict[str, list[str]] = {section: [] for section in SECTIONS}
    for key, field in list_settings():
        section, dot, _ = key.partition(".")
        default = _default(field).removeprefix("[").removesuffix("]")
        about = " ".join((field.description or "").split())
        rows[section if dot else ""].append(f"| `{key}` | {table_cell(default)} | {table_cell(about)} |")
    parts = [SETTINGS]
    for section, title in SECTIONS.items():
        parts.append("\n".join([f"## {title}", "", "| setting | default | meaning |", "|---|---|---|", *rows[section]]) + "\n")
    return "\n".join(parts)


def table_cell(text: str) -> str:
    """Text as a cell of a Markdown table takes it."""
    return text.replace("|", "\\|")


PAGES = {"commands.md": command_pages, "settings.md": settings_page}


def main() -> int:
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    given = parser.parse_args()
    stale = 0
    for name, make in PAGES.items():
        page, path = make(), ROOT / "docs" / name
        if path.exists() and path.read_text(encoding="utf-8") == page:
            continue
        stale += 1
        if given.check:
            print(f"docs/{name} is stale; `python tools/pages.py` writes it")
        else:
            path.write_text(page, encoding="utf-8")
            print(f"docs/{name}: written")
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
