"""What is found by listing the packages of one name: families, probes, suites, formats, readers, engines and ways of choosing,
in whichever package they lie. So the core imports nothing else of what stands around it."""

import ast
import pkgutil
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]


def listed(name: str) -> dict[str, str]:
    """The name of each file in the packages of that name -> its module, in the order of the names. listed("formats")["hf"] is
    surgery.exporting.formats.hf; listed("families") has the files of surgery/families and of surgery/more/families. None of
    them is imported."""
    places = [PACKAGE / name, *sorted(PACKAGE.glob(f"*/{name}"))]
    found = [
        (module.name, ".".join(place.relative_to(PACKAGE.parent).parts))
        for place in places
        for module in pkgutil.iter_modules([str(place)])
    ]
    return {module: f"{package}.{module}" for module, package in sorted(found)}


def described(name: str) -> dict[str, str]:
    """The name of each such file -> the first paragraph of what it says of itself, in one line and without the period."""
    trees = {file: _tree(module) for file, module in listed(name).items()}
    said = {file: ast.get_docstring(tree) or "" for file, tree in trees.items()}
    return {file: " ".join(text.split("\n\n")[0].split()).removesuffix(".") for file, text in said.items()}


def literals(name: str) -> dict[str, dict[str, Any]]:
    """The name of each such file -> its constants whose values are written out, read off its text without running it."""
    return {file: dict(_constants(_tree(module))) for file, module in listed(name).items()}


def _tree(module: str) -> ast.Module:
    return ast.parse(PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))


def _constants(tree: ast.Module) -> list[tuple[str, Any]]:
    found = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found.append((node.targets[0].id, ast.literal_eval(node.value)))
            except ValueError:  # computed
                continue
    return found
