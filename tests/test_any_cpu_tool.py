"""tools/any_cpu.py: tests run under the settings that it says, and what fails is named."""

from tools import any_cpu

TEST = """
import os, torch

def test_setting():
    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT" and torch.get_num_threads() == 2
    assert os.environ["MKL_ENABLE_INSTRUCTIONS"] == "SSE4_2"

def test_that_fails():
    assert os.environ["ATEN_CPU_CAPABILITY"] == "avx2"
"""


def test_a_setting_is_told_to_the_tests_and_failures_are_named(tmp_path, capsys):
    (tmp_path / "test_it.py").write_text(TEST)
    row = any_cpu.run("default", 2, [str(tmp_path / "test_it.py")])
    assert len(row.failed) == 1
    assert row.failed[0].endswith("test_it.py::test_that_fails")
    assert row.outcome == "1 failed, 1 passed"
    assert "| default | 2 | 1 failed, 1 passed |" in any_cpu.table([row])


def test_what_the_processor_lacks_is_left_out_and_failures_end_with_1(monkeypatch, capsys):
    monkeypatch.setattr(any_cpu.cpu, "get_cpu_capability", lambda: "AVX2")
    ran = []

    def run(setting, threads, tests):
        ran.append((setting, threads))
        return any_cpu.Row(setting, threads, "1 passed", 1.0, ("test_x",) if setting == "avx2" and threads == 2 else ())

    monkeypatch.setattr(any_cpu, "run", run)
    assert any_cpu.main([]) == 1
    assert ran == [("default", 1), ("default", 2), ("avx2", 1), ("avx2", 2)]
    assert "avx512: left out, it has AVX2 at most" in capsys.readouterr().out


def test_no_test_found_is_a_failure(tmp_path, capsys):
    assert any_cpu.run("default", 1, [str(tmp_path)]).failed == ("pytest ended with status 5",)


def test_what_it_names_is_there():
    for path in (*any_cpu.NUMERICAL, *any_cpu.QUICK):
        assert any_cpu.os.path.exists(path), path
