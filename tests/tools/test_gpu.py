"""`make gpu`, as far as it goes without one."""

import json
import subprocess
import sys

import pytest
import torch

from surgery.kernels import explain
from surgery.kernels.choose import Backend, Operation
from tools import gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "gpu.jsonl")])
    assert gpu.main() == 2
    assert "no GPU" in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]


def test_without_torch_it_says_so():
    code = "import sys; sys.modules['torch'] = None; import tools.gpu"
    done = subprocess.run([sys.executable, "-c", code], cwd=gpu.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "has no torch" in done.stderr
    assert "Traceback" not in done.stderr


def test_its_parts_run_on_a_cpu(tmp_path, monkeypatch):
    parts = ["versions", "backends", "step", "attention", "scans", "memory"]
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "gpu.jsonl"), "--rehearse", "--only", *parts])
    assert gpu.main() == 0
    said = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [each["part"] for each in said if each["name"] == "done"] == parts


@pytest.mark.parametrize(
    ("failure", "failed"), [(RuntimeError("No valid triton configs"), 2), (ModuleNotFoundError("No module named 'a'"), 0)]
)
@pytest.mark.filterwarnings("ignore:.*does not serve here")
def test_what_is_installed_and_does_not_serve_has_failed(tmp_path, monkeypatch, failure, failed):
    def fails(x):
        raise failure

    first, last = Backend("first", fails, probed=True, by_size=True), Backend("last", lambda x: x * 2)
    hub = Backend("hub", lambda x: pytest.fail("nothing is downloaded"), probed=True, on_request=True)
    name = f"gpu_{type(failure).__name__}"
    operation = Operation(name, "x:btc", lambda x: [(x.shape, x.dtype)], 1, first, hub, last)
    monkeypatch.delitem(Operation.registry, name)
    made = [("a call", operation, [torch.randn(2, 9, 8)])]
    monkeypatch.setattr(explain, "make_calls", lambda device, dtype, sizes: made if dtype == torch.float32 else [])
    record = gpu.Record(tmp_path / "gpu.jsonl", "cpu", True)
    gpu.backends(record)
    assert record.failed == failed
    assert (tmp_path / "gpu.jsonl").read_text().count("serves") >= 2  # forward, and with the gradient
