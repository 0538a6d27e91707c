"""What the package holds of a kind (probes, laws, formats, ...), with one line about each, without importing any of it."""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent


@cache
def list_modules(folder: str, marker: str) -> dict[str, str]:
    """Name -> first line of the docstring, of the modules of a folder that define `marker` at their top.

    folder: inside this package, e.g. "probes". marker: a name, e.g. "PROBE" or "LAW"; a module without it is a helper.
    """
    found = {}
    for path in sorted((PACKAGE / folder).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if marker in _top_names(tree):
            found[path.stem] = _first_line(ast.get_docstring(tree))
    return found


@cache
def list_table(file: str, table: str) -> dict[str, str]:
    """Key -> first line about it, of a dictionary that a module defines at its top.

    file: inside this package, e.g. "evaluation/suites.py". A value that is a text is itself the line, as is the first text of
    a call; the name of a function or class is described by its docstring.
    """
    path = PACKAGE / file
    if not path.exists():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    about = {
        node.name: _first_line(ast.get_docstring(node))
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    for node in tree.body:
        if table in _targets(node) and isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {str(key.value): _line_about(value, about) for key, value in pairs if isinstance(key, ast.Constant)}
    return {}


def _line_about(value: ast.expr, about: dict[str, str]) -> str:
    parts = value.args if isinstance(value, ast.Call) else value.elts if isinstance(value, ast.Tuple) else [value]
    first = parts[0] if parts else value
    if isinstance(first, ast.Constant):
        return str(first.value)
    return about.get(first.id, "") if isinstance(first, ast.Name) else ""


def _top_names(tree: ast.Module) -> set[str]:
    return {
        name
        for node in tree.body
        for name in (_targets(node) | ({node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef) else set()))
    }


def _targets(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]
