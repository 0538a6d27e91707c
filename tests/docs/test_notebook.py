"""The notebook runs from its first cell to its last, and is committed as it ran."""

import os

import nbformat
import pytest

from tests.docs.pages import ROOT
from tools.run_notebook import NOTEBOOK, run


def code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_is_committed_with_its_outputs_and_pictures():
    cells = code(nbformat.read(NOTEBOOK, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert not [output for output in outputs if output.get("name") == "stderr"]  # it would name places on the maker's machine


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "docs").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = run(tmp_path / "docs")
    assert code(notebook)[-1].outputs[0].data["text/plain"].strip("' ") == "80"  # what the tuned hybrid answers
