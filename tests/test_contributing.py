"""What contributors are told holds: pins agree, commands exist, links lead somewhere."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_commit_hook_runs_the_linter_of_the_project():
    development = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    hooks = {
        repo["repo"].rpartition("/")[2]: repo
        for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    }
    assert f"ruff=={hooks['ruff-pre-commit']['rev'].removeprefix('v')}" in development


def test_its_make_targets_exist():
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    named = {target for line in re.findall(r"make ([\w./ -]+)", PAGE) for target in line.split() if target != "#"}
    assert {"check", "test", "test-slow", "demo", "promises", "docs"} <= named & targets


def test_its_links_and_files_exist():
    for name in {*re.findall(r"\]\(([\w./-]+)\)", PAGE), *re.findall(r"pytest ([\w/]+\.py)", PAGE)}:
        assert (ROOT / name).exists(), name


def test_issue_forms_are_forms():
    """GitHub shows a form only if it has these keys, and no two fields of one name."""
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 3
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys()
        ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
        assert len(ids) == len(set(ids)) > 0
        assert all(field["attributes"].get("label") for field in form["body"] if field["type"] != "markdown")
