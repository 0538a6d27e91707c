"""What is found by listing the packages of one name: families, probes, suites, formats, readers, engines, ways of choosing and
views, in whichever package they lie. So the core imports nothing else of what stands around it."""

import ast
import pkgutil
from pathlib import Path
from typing import Any

from surgery.errors import UserError

PACKAGE = Path(__file__).parents[1]
ROOTS = (PACKAGE,)  # where such packages lie


def listed(name: str) -> dict[str, str]:
    """The name of each file in the packages of that name -> its module, in the order of the names. listed("formats")["hf"] is
    surgery.exporting.formats.hf; listed("families") has the files of surgery/families and of surgery/more/families. None of
    them is imported. Raises UserError if two of them have one name."""
    return {file: module for file, (module, _) in _files(name).items()}


def described(name: str) -> dict[str, str]:
    """The name of each such file -> the first paragraph of what it says of itself, in one line and without the period."""
    said = {file: ast.get_docstring(_tree(path)) or "" for file, (_, path) in _files(name).items()}
    return {file: " ".join(text.split("\n\n")[0].split()).removesuffix(".") for file, text in said.items()}


def literals(name: str, *needed: str) -> dict[str, dict[str, Any]]:
    """The name of each such file -> its constants whose values are written out, read off its text without running it. Raises
    UserError if one of those that are needed is not among them."""
    found = {}
    for file, (_, path) in _files(name).items():
        found[file] = _constants(_tree(path))
        if missing := [constant for constant in needed if constant not in found[file]]:
            raise UserError(f"{path} has to say {' and '.join(missing)}, written out: it is read before anything is imported")
    return found


def _files(name: str) -> dict[str, tuple[str, Path]]:
    """The name of each such file -> (its module, where it is)."""
    found: dict[str, tuple[str, Path]] = {}
    for root in ROOTS:
        for place in (root / name, *sorted(root.glob(f"*/{name}"))):
            for module in pkgutil.iter_modules([str(place)]):
                if module.ispkg:
                    continue
                path = place / f"{module.name}.py"
                if module.name in found:
                    raise UserError(f"{found[module.name][1]} and {path} have one name; rename one of them")
                found[module.name] = ".".join(path.relative_to(root.parent).with_suffix("").parts), path
    return dict(sorted(found.items()))


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise UserError(f"{path} is no Python: line {error.lineno}: {error.msg}") from error


def _constants(tree: ast.Module) -> dict[str, Any]:
    found = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and node.value is not None:
            try:
                found[target.id] = ast.literal_eval(node.value)
            except ValueError:  # computed
                continue
    return found
