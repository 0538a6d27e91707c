"""surgery doctor"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surgery.cli.console import show, starting, table
from surgery.cli.options import Trust
from surgery.doctor.groups import GROUPS
from surgery.errors import UserError
from surgery.records.reading import check_name

if TYPE_CHECKING:
    from surgery.doctor.benchmark import Benchmark
    from surgery.doctor.diagnosis import Diagnosis
    from surgery.doctor.result_tables import Table


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(help="A model to examine: Hub id, folder, original folder, or patch. Only its configuration is read."),
    ] = None,
    bench: Annotated[
        bool, typer.Option("--bench", help="Also measure the kernels against what they replace (minutes).")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help=f"Measure only this (again for more): {', '.join(GROUPS)}.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Time for each measurement, at least.")] = 6.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write the JSON to this file; with --only, into what was measured before.")
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Say which kernels serve on this machine, or what can be done with a model.

    For every operation: the kernel that serves it, and why the others do not. For
    a model: which layers can be grafted, how they are located, how the hybrid can
    be exported, and why not in other formats. Its weights are not read.

    Examples:
      surgery doctor
      surgery doctor checkpoints/tiny-mamba2
      surgery doctor --bench --only rms_norm_forward --out bench.json
    """
    if unknown := set(only or ()) - set(GROUPS):
        raise UserError(f"nothing to measure is named '{min(unknown)}'; there are {', '.join(GROUPS)}")
    if model is not None:
        if bench or only:
            raise UserError("--bench and --only measure kernels, not a model; leave them out")
        _examined(check_name(model), trust_remote_code, as_json, out)
        return
    result, rows = _measured(only, seconds, out) if bench else _diagnosed(out)
    if out:
        result.write(out)
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    from surgery.doctor.result_tables import describe

    show(describe(result.environment))
    table(*rows)


def _examined(model: str, trust_remote_code: bool, as_json: bool, out: Path | None) -> None:
    with starting():
        from surgery.doctor.examination import Examination, examine
        from surgery.doctor.examination_text import lines

        if out:
            Examination.check_place(out)
        examination = examine(model, trust_remote_code)
    if out:
        examination.write(out)
    if as_json:
        print(examination.model_dump_json(indent=2))
        return
    for line in lines(examination):
        show(line)


def _diagnosed(out: Path | None) -> tuple["Diagnosis", "Table"]:
    from surgery.doctor.diagnosis import Diagnosis, diagnose
    from surgery.doctor.result_tables import verdict_rows

    if out:
        Diagnosis.check_place(out)
    diagnosis = diagnose()
    return diagnosis, verdict_rows(diagnosis)


def _measured(only: list[str] | None, seconds: float, out: Path | None) -> tuple["Benchmark", "Table"]:
    """With `only`, within what an earlier call wrote to `out`."""
    from surgery.doctor.benchmark import Benchmark, benchmark, here
    from surgery.doctor.result_tables import cell_rows

    if out:
        Benchmark.check_place(out)
    earlier = Benchmark.read(out) if only and out and out.exists() else None
    if earlier is not None:
        earlier.check_environment(here())  # before minutes are spent
    result = benchmark(tuple(only or GROUPS), seconds=seconds)
    if earlier is not None:
        result = earlier.updated(result)
    return result, cell_rows(result)
