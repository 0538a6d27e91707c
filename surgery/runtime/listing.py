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
        if any(marker in _names(node) for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


@cache
def list_table(file: str, table: str) -> dict[str, str]:
    """Key -> first line about it, of a dictionary that a module defines at its top.

    file: inside this package, e.g. "evaluation/suites.py". A value that is a text is itself the line, as is the first text of
    a call; the name of a function or class is described by its docstring.
    """
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    about = {
        node.name: (ast.get_docstring(node) or "").partition("\n")[0]
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    found = {}
    for node in tree.body:
        if table in _names(node) and isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                parts = value.args if isinstance(value, ast.Call) else value.elts if isinstance(value, ast.Tuple) else [value]
                first = parts[0] if parts else value
                if isinstance(key, ast.Constant):
                    line = about.get(first.id, "") if isinstance(first, ast.Name) else getattr(first, "value", "")
                    found[str(key.value)] = str(line)
    return found


def _names(node: ast.stmt) -> set[str]:
    """What a statement at the top of a module defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
