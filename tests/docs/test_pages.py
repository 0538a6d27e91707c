"""The pages: what is filled is up to date, links lead to files, and commands, settings and Python names exist."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from surgery import __all__ as PUBLIC
from surgery.cli.app import app
from surgery.cli.list import KINDS
from surgery.records.recipe import apply_settings, list_settings, make_recipe
from tools.pages import PAGES, ROOT

TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = typer.main.get_command(app).commands
SETTINGS = {key for key, _ in list_settings()}
KNOWN = SETTINGS | {key.rpartition(".")[0] for key in SETTINGS}
FREE = ("locate.options.",)  # below it stand a probe's own options

every_page = pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.stem)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def spoken_commands(page: Path) -> list[list[str]]:
    """The words of every `surgery ...` line of bash blocks and of code within sentences; no comments, no continued lines."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += [code for code in re.findall(r"`([^`\n]+)`", text) if code.startswith("surgery ")]
    return [words[1:] for line in lines if (words := shlex.split(line, comments=True))[:1] == ["surgery"]]


@pytest.mark.parametrize("name", PAGES)
def test_filled_pages_are_up_to_date(name):
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == PAGES[name]()


def test_filling_is_checked_without_torch():
    code = "import sys; sys.argv[1:] = ['--check']; from tools import pages; sys.exit(pages.main() or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@every_page
def test_links_lead_to_files(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    relative = [target.partition("#")[0] for target in targets if not re.match(r"\w+:|#", target)]
    assert [target for target in relative if not (page.parent / target).exists()] == []


@every_page
def test_commands_and_options_exist(page):
    for words in spoken_commands(page):
        if words[0].startswith("-"):
            continue
        if words[0] == words[0].upper():  # a placeholder: surgery COMMAND --help
            continue
        assert words[0] in COMMANDS, words
        known = {name for parameter in COMMANDS[words[0]].params for name in parameter.opts} | {"--help", "-h"}
        assert [word for word in words if word.startswith("--") and word.partition("=")[0] not in known] == [], words


@every_page
def test_settings_exist(page):
    text = page.read_text(encoding="utf-8")
    commands = [[words[i + 1] for i, word in enumerate(words[:-1]) if word == "--set"] for words in spoken_commands(page)]
    commands = [[each for each in given if not re.search(r"=[A-Z]", each)] for given in commands]  # KEY=VALUE, path=FILE
    spoken = re.findall(r"`((?:data|locate|plan|tune|bench)\.(?!json)[a-z_.]+)(?:=[^`]*)?`", text)
    for key in [*(setting.partition("=")[0] for given in commands for setting in given), *spoken]:
        assert key in KNOWN or key.startswith(FREE), key
    for given in commands:
        make_recipe(apply_settings({"model": "m"}, given), " ".join(given))


@every_page
def test_lists_exist(page):
    for words in spoken_commands(page):
        if words[0] == "list" and len(words) > 1:
            assert words[1] in {*KINDS, "--help", "KIND"}


@every_page
def test_python_is_python_and_uses_public_names(page):
    for block in blocks(page, "python"):
        tree = ast.parse(block)
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "surgery"
        }
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "surgery"
            for alias in node.names
        }
        assert used | imported <= {*PUBLIC, "modeling"}


def test_messages_of_troubleshooting_are_the_toolkit_s():
    source = " ".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "surgery").rglob("*.py")))
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) >= 30
    assert [each for each in messages for part in each.split("…") if part.strip() not in source] == []
