"""Writes the modeling code beside the weights, so that a hybrid loads where this package is not installed.

transformers runs such code from one flat folder, with `trust_remote_code=True`. The package's own files are copied into it,
with absolute imports made relative; nothing is written twice by hand.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from surgery.errors import UserError

PACKAGE = Path(__file__).parents[1]
# In the package, imports are absolute. In a flat folder they are relative, and a hybrid loaded from it can be saved again.
IMPORT = re.compile(r"^from (surgery)?\.((?:\w+\.)*)(\w+) import", flags=re.M)


@dataclass(frozen=True)
class Generated:
    """A module that is made for exports. name: of its file. imports: the names here of the modules of ours that it imports."""

    name: str
    text: str
    imports: tuple[str, ...]


def sources(model_class: type) -> dict[str, str]:
    """What to write for the module of a class and all that it imports of ours: file name -> text. The class may say what its
    module is to be instead, as `generated` (stock_hybrid.py). Raises UserError for a module that
    imports a package of ours."""
    generated: Generated | None = getattr(model_class, "generated", None)
    texts = {} if generated is None else {generated.name: generated.text}
    modules = (model_class.__module__,) if generated is None else generated.imports
    paths = [Path(str(sys.modules[module].__file__)) for module in modules]
    while paths:
        path = paths.pop()
        if path.name not in texts:
            text = path.read_text()
            texts[path.name] = IMPORT.sub(r"from .\3 import", text)
            for absolute, folder, name in IMPORT.findall(text):
                imported = (PACKAGE if absolute else path.parent) / folder.replace(".", "/") / f"{name}.py"
                if not imported.is_file():
                    raise UserError(
                        f"{path.name} cannot be exported, since it imports {imported.with_suffix('')}, which is not one "
                        "file; a model class goes to a file of surgery/more/hybrids, and imports as little as those there"
                    )
                paths.append(imported)
    return texts


def write_sources(folder: str | Path, model_class: type) -> None:
    """Copy the modeling code of a class into `folder`."""
    for name, text in sources(model_class).items():
        (Path(folder) / name).write_text(text)
