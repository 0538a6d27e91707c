"""Tables of the doctor's results, for the terminal and the documentation."""

from typing import TYPE_CHECKING

from surgery.doctor.diagnosis import Diagnosis
from surgery.doctor.groups import GROUPS
from surgery.records.record import Environment

if TYPE_CHECKING:  # it imports whole models
    from surgery.doctor.benchmark import Benchmark, BenchmarkCell

Table = tuple[list[str], list[list[str]]]


def describe(environment: Environment) -> str:
    """One line on the machine and the software."""
    packages = ", ".join(f"{name} {version}" for name, version in environment.packages.items())
    return f"{environment.created[:10]}, {environment.machine}, {environment.threads} threads; {packages}"


def verdict_rows(diagnosis: Diagnosis) -> Table:
    """One row for each operation, device and dtype."""
    body = []
    for verdict in diagnosis.verdicts:
        others = [f"{name}: {reason}" for name, reason in verdict.refused.items()]
        others += [f"{name}, not preferred: {reason}" for name, reason in verdict.idle.items() if reason]
        if ready := [name for name, reason in verdict.idle.items() if not reason]:
            others.append(f"ready: {', '.join(ready)}")
        body.append([verdict.operation, verdict.device, verdict.dtype, verdict.serves, "\n".join(others)])
    return ["operation", "device", "dtype", "served by", "not by"], body


def cell_rows(benchmark: "Benchmark", before: "Benchmark | None" = None) -> Table:
    """One row for each measurement. before: an earlier version's, whose ratios of the same cells make a column of their own."""
    earlier = {} if before is None else {_of(group, cell): cell.ratio for group in GROUPS for cell in getattr(before, group)}
    body = []
    for group in GROUPS:
        for cell in getattr(benchmark, group):
            times = ", ".join(f"{name} {value:.4g} ms" for name, value in cell.milliseconds.items())
            memory = "" if cell.memory_ratio is None else f"{cell.memory_ratio:.2f}"
            times += "" if cell.difference is None else f"; logits differ by {cell.difference:.0e}"
            row = [
                group.replace("_", " "),
                cell.shape,
                f"{cell.tokens:,}",
                str(cell.threads),
                times,
                f"{cell.ratio:.2f}",
                memory,
            ]
            if before is not None:
                ratio = earlier.get(_of(group, cell))
                row.append("" if ratio is None else f"{ratio:.2f}")
            body.append(row)
    header = ["measured", "shape", "tokens", "threads", "median time", "times as fast", "memory, share"]
    return header if before is None else [*header, f"in {before.environment.toolkit}"], body


def _of(group: str, cell: "BenchmarkCell") -> tuple[str, str, int, int]:
    """What two measurements have in common that may be compared."""
    return group, cell.shape, cell.tokens, cell.threads
