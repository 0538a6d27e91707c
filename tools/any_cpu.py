"""Runs tests as they would run on other processors, and prints a table.

    python -m tools.any_cpu [--all | --quick] [TESTS ...]

PyTorch, MKL and oneDNN choose their kernels by the processor, and can be told to choose as on an older one; our kernels in C
are compiled for it. Every setting runs with one thread and with two. One that this processor lacks is named and left out.

--quick: two settings that differ most, on what `QUICK` names, a minute of processor time, for CI. --all: the whole suite.
Without either, and without tests: the numerical tests.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch.backends import cpu

SETTINGS = {  # what PyTorch, MKL and oneDNN are told, and the C compiler
    "default": ("default", "SSE4_2", "SSE41", "-mno-avx"),
    "avx2": ("avx2", "AVX2", "AVX2", "-mno-avx512f"),
    "avx512": ("avx512", "AVX512", "AVX512_CORE", ""),
}
ORDER = ("DEFAULT", "AVX2", "AVX512")  # of torch's own words
NUMERICAL = (
    "tests/kernels",
    *(
        f"tests/surgery/test_{name}.py"
        for name in (
            *("replay", "hybrid", "laws", "families", "matrices", "layer_graft", "layer_alignment", "llamba", "functional"),
            *(
                "half",
                "packing",
                "locate",
                "stability",
                "prune",
                "export",
                "export_formats",
                "tune",
                "tune_stages",
                "tune_scale",
            ),
        )
    ),
)
QUICK = tuple(f"tests/kernels/test_{name}.py" for name in ("scans", "conv", "norm"))
QUICK_SETTINGS = (("default", 1), ("avx2", 2))


@dataclass
class Row:
    """A setting and what became of its tests."""

    setting: str
    threads: int
    outcome: str
    seconds: float
    failed: tuple[str, ...] = ()


def environment(setting: str, threads: int) -> dict[str, str]:
    """The variables of a process in which the libraries and kernels are those of a processor."""
    torch_kernels, mkl, onednn, flag = SETTINGS[setting]
    compiler = " ".join(filter(None, (os.environ.get("CC", "cc"), flag if _is_x86() else "")))
    own = {"ATEN_CPU_CAPABILITY": torch_kernels, "MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn, "CC": compiler}
    return os.environ | own | {"SURGERY_TEST_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}


def _is_x86() -> bool:
    return os.uname().machine == "x86_64"


def lacking(setting: str) -> str | None:
    """Why this processor cannot run a setting, or None."""
    here = cpu.get_cpu_capability()
    if here not in ORDER:
        return None if setting == "default" else f"torch's kernels are for {here} here"
    return f"it has {here} at most" if ORDER.index(setting.upper()) > ORDER.index(here) else None


def run(setting: str, threads: int, tests: Sequence[str]) -> Row:
    """The tests under a setting, one process; what they print goes on to standard output."""
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    lines = []
    with subprocess.Popen(command, env=environment(setting, threads), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    failed = tuple(match[1] for line in lines if (match := re.match(r"(?:FAILED|ERROR) (\S+)", line)))
    summary = re.sub(r"\S+ warnings?, | in [\d.]+s.*", "", lines[-1]).strip("= \n") if lines else "nothing"
    outcome = summary if process.returncode == 0 else summary or f"status {process.returncode}"
    if process.returncode and not failed:
        failed = (f"pytest ended with status {process.returncode}",)
    return Row(setting, threads, outcome, time.monotonic() - start, failed)


def table(rows: Sequence[Row]) -> str:
    lines = ["| processor | threads | tests | seconds |", "|---|---|---|---|"]
    lines += [f"| {row.setting} | {row.threads} | {row.outcome} | {row.seconds:.0f} |" for row in rows]
    return "\n".join([*lines, *(f"{row.setting}, {row.threads}: {name}" for row in rows for name in row.failed)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true")
    which.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    tests = given.tests or (("tests",) if given.all else QUICK if given.quick else NUMERICAL)
    settings = QUICK_SETTINGS if given.quick else [(setting, threads) for setting in SETTINGS for threads in (1, 2)]
    rows = []
    for setting, threads in settings:
        if reason := lacking(setting):
            print(f"{setting}: left out, {reason}", flush=True)
        else:
            rows.append(run(setting, threads, tests))
    print(table(rows))
    return int(not rows or any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
