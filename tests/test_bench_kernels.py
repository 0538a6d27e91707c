"""The benchmark of kernels: its arithmetic, and equal contenders. Nothing here asks how fast anything is."""

import time
from functools import partial

import pytest
import torch

from surgery.errors import UserError
from surgery.kernels.ssd import SSD_SCAN
from surgery.records.record import environment
from surgery.runtime.timing import peak_bytes
from tests.models import SAME, float64
from tools import bench_shapes as shapes
from tools.bench_kernels import Benchmark, benchmark, cases, kernel_case, measure
from tools.bench_shapes import ssd_inputs
from tools.bench_tuning import graft_against_trainer
from tools.turns import milliseconds

CPU = torch.device("cpu")


@pytest.mark.parametrize("backward", [False, True])
def test_a_cell_says_what_was_measured(backward):
    inputs = partial(ssd_inputs, 2, 200, CPU, torch.float32)
    case = kernel_case(SSD_SCAN, "small", 200, "stock", inputs, torch.float32, backward=backward)
    cell = measure(case, CPU, threads=1, seconds=0)
    assert (case.group, cell.baseline) == (f"ssd_forward{'_backward' * backward}", "stock")
    assert cell.ours == SSD_SCAN.choose(*inputs()).name
    assert {"chunked", "stock"} <= set(cell.milliseconds) == set(cell.memory_mb)
    assert cell.ratio == pytest.approx(cell.milliseconds["stock"] / cell.milliseconds[cell.ours], rel=0.01)
    assert cell.memory_ratio == pytest.approx(cell.memory_mb[cell.ours] / cell.memory_mb["stock"], rel=0.02)
    assert cell.memory_mb[cell.ours] >= 200 * 2 * 64 * 4 / 2**20 - 0.01  # its output at least


def test_models_are_compared_on_the_same_weights(monkeypatch):
    monkeypatch.setattr(shapes, "BASES", {"tiny-mamba2": shapes.BASES["tiny-mamba2"]})
    found = benchmark(("prefill",), device=CPU, seconds=0)
    assert {(cell.shape, cell.tokens) for cell in found.prefill} == {("tiny-mamba2", 1024), ("tiny-mamba2", 4096)}
    assert not found.ssd_forward
    with float64():
        runs = next(case for case in cases(CPU) if case.group == "prefill").make()
        torch.testing.assert_close(runs["ours"](), runs["stock"](), **SAME)


def test_contenders_take_turns():
    calls = []
    times = milliseconds({"a": lambda: calls.append("a"), "b": lambda: (calls.append("b"), time.sleep(0.02))}, CPU, seconds=0)
    assert calls == ["a", "b"] * 4  # one round to warm up, and three
    assert times["b"] >= 20


def test_peak_memory_counts_what_is_held_at_once():
    def held():
        a = torch.empty(1000, dtype=torch.float32)
        b = torch.empty(3000, dtype=torch.float32)
        del a
        return b, torch.empty(500, dtype=torch.float32)

    assert peak_bytes(held, CPU) == pytest.approx(16_000, abs=400)  # allocations are rounded up


def test_a_part_is_measured_again_into_the_whole():
    cell = {"shape": "s", "tokens": 1, "device": "cpu", "dtype": "float32", "threads": 1, "ours": "a", "baseline": "b",
            "milliseconds": {"a": 1.0, "b": 2.0}, "ratio": 2.0}  # fmt: skip
    here = environment()
    old = Benchmark(environment=here, ssd_forward=(cell,), prefill=(cell,))
    new = Benchmark(environment=here.model_copy(update={"created": "later"}), prefill=({**cell, "ratio": 3.0},))
    both = old.updated(new)
    assert (both.ssd_forward, both.prefill, both.environment.created) == (old.ssd_forward, new.prefill, "later")
    with pytest.raises(UserError, match="on another machine or with other packages"):
        old.updated(new.model_copy(update={"environment": here.model_copy(update={"threads": 99})}))


@pytest.mark.slow  # steps of a model of benchmarks
def test_both_tuning_steps_run():
    """What is timed is a step that learns: a finite loss, of the same size for both."""
    losses = {name: float(step()) for name, step in graft_against_trainer(torch.device("cpu"))().items()}
    assert losses.keys() == {"graft", "trainer"}
    assert all(0 < loss < 20 for loss in losses.values()), losses
