"""Writes the modeling code beside the weights, so that a hybrid loads where this package is not installed.

transformers runs such code from one flat folder, with `trust_remote_code=True`. The package's own files are copied into it,
with absolute imports made relative; nothing is written twice by hand.
"""

import re
import sys
from pathlib import Path

# In the package the files lie in these folders; a hybrid that was loaded from a flat folder can be saved again.
FOLDERS = (".", "../kernels", "..", "../models", "../records")
IMPORT = re.compile(r"^from surgery\.(?:\w+\.)?(\w+) import|^from \.(\w+) import", flags=re.M)


def sources(model_class: type) -> dict[str, str]:
    """What to write for the module of a class and all that it imports of ours: file name -> text."""
    here, texts = Path(__file__).parent, {}
    paths = [Path(str(sys.modules[model_class.__module__].__file__))]
    while paths:
        path = paths.pop()
        if path.name not in texts:
            text = path.read_text()
            texts[path.name] = IMPORT.sub(lambda match: f"from .{match[1] or match[2]} import", text)
            for absolute, relative in IMPORT.findall(text):
                places = (here / folder / f"{absolute or relative}.py" for folder in FOLDERS)
                paths.append(next(place for place in places if place.exists()))
    return texts


def write_sources(folder: str | Path, model_class: type) -> None:
    """Copy the modeling code of a class into `folder`."""
    for name, text in sources(model_class).items():
        (Path(folder) / name).write_text(text)
