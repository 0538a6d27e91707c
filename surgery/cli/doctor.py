"""surgery doctor"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surgery.cli.console import show, table
from surgery.doctor.groups import GROUPS
from surgery.errors import UserError

if TYPE_CHECKING:
    from surgery.doctor.benchmark import Benchmark
    from surgery.doctor.diagnosis import Diagnosis
    from surgery.doctor.result_tables import Table


def doctor(
    bench: Annotated[
        bool, typer.Option("--bench", help="Also measure the kernels against what they replace (minutes).")
    ] = False,
    only: Annotated[list[str] | None, typer.Option("--only", help=f"Measure only this: {', '.join(GROUPS)}.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Time for each measurement, at least.")] = 6.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write the JSON to this file; with --only, into what was measured before.")
    ] = None,
) -> None:
    """Say which kernels serve on this machine.

    Of every operation: the kernel that serves it, and why the others do not.

    Examples:
      surgery doctor
      surgery doctor --bench --only rms_norm_forward --out bench.json
    """
    if unknown := set(only or ()) - set(GROUPS):
        raise UserError(f"nothing to measure is named '{min(unknown)}'; there are {', '.join(GROUPS)}")
    result, rows = _measured(only, seconds, out) if bench else _diagnosed()
    if out:
        result.write(out)
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    from surgery.doctor.result_tables import describe

    show(describe(result.environment))
    table(*rows)


def _diagnosed() -> tuple["Diagnosis", "Table"]:
    from surgery.doctor.diagnosis import diagnose
    from surgery.doctor.result_tables import verdict_rows

    diagnosis = diagnose()
    return diagnosis, verdict_rows(diagnosis)


def _measured(only: list[str] | None, seconds: float, out: Path | None) -> tuple["Benchmark", "Table"]:
    """With `only`, within what an earlier call wrote to `out`."""
    from surgery.doctor.benchmark import Benchmark, benchmark, here
    from surgery.doctor.result_tables import cell_rows

    earlier = Benchmark.read(out) if only and out and out.exists() else None
    if earlier is not None:
        earlier.check_environment(here())  # before minutes are spent
    result = benchmark(tuple(only or GROUPS), seconds=seconds)
    if earlier is not None:
        result = earlier.updated(result)
    return result, cell_rows(result)
