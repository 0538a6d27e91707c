"""Run docs/notebook.ipynb and keep what its cells show: python -m tools.run_notebook

Warnings and progress (standard error) are left out.
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "docs" / "notebook.ipynb"


def run(folder: Path) -> nbformat.NotebookNode:
    """The notebook as it runs in a folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    nbformat.write(run(NOTEBOOK.parent), NOTEBOOK)
