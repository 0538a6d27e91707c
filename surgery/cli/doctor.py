"""surgery doctor"""

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.console import show, starting, table
from surgery.cli.options import Trust
from surgery.records.reading import check_name


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(help="A model to examine: Hub id, folder, original folder, or patch. Only its configuration is read."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the JSON to this file.")] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Say which kernels serve on this machine, or what can be done with a model.

    For every operation: the kernel that serves it, and why the others do not. For
    a model: which layers can be grafted, how they are located, how the hybrid can
    be exported, and why not in other formats. Its weights are not read.

    Examples:
      surgery doctor
      surgery doctor checkpoints/tiny-mamba2
    """
    name = None if model is None else check_name(model)
    with starting():
        from surgery.doctor.diagnosis import Diagnosis, describe, diagnose, verdict_rows
        from surgery.doctor.examination import Examination, examine
        from surgery.doctor.examination_text import lines

        if out:
            (Diagnosis if name is None else Examination).check_place(out)
        result = diagnose() if name is None else examine(name, trust_remote_code)
    if out:
        result.write(out)
    if as_json:
        print(result.model_dump_json(indent=2))
    elif isinstance(result, Examination):
        for line in lines(result):
            show(line)
    else:
        show(describe(result.environment))
        table(*verdict_rows(result))
