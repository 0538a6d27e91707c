"""The command line: parses, calls, prints. A file per verb; what a verb does is in the packages that it imports once called.

Nothing here, and nothing at the top of a verb's file, imports torch, transformers or another package that takes long: `--help`
and a typo answer at once.
"""

import errno
import sys
from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated

import typer

from surgery.cli.bench import bench
from surgery.cli.doctor import doctor
from surgery.cli.export import export
from surgery.cli.lists import report_schema, tasks_path
from surgery.cli.locate import locate
from surgery.cli.look import look
from surgery.cli.options import until_the_end
from surgery.cli.plan import plan
from surgery.cli.pretrain import pretrain
from surgery.cli.prune import prune
from surgery.cli.publish import publish
from surgery.cli.run import run
from surgery.cli.settings import list_names, settings
from surgery.cli.splice import splice
from surgery.cli.table import table
from surgery.cli.tune import tune
from surgery.errors import UserError
from surgery.jobs.interruption import Interrupted, continuation, listening
from surgery.records.reading import shown
from surgery.runtime import processes
from surgery.runtime.printable import printable
from surgery.runtime.processes import is_main, several_processes
from surgery.runtime.quiet import hush_transformers

LONGEST = 1500  # characters of what is said of a wrong input, which may itself be long
# In the order of --help: the pipeline first.
VERBS: dict[str, Callable[..., None]] = {
    "look": look, "run": run, "locate": locate, "plan": plan, "splice": splice, "tune": tune, "bench": bench, "table": table,
    "export": export, "publish": publish, "prune": prune, "settings": settings, "list": list_names, "doctor": doctor,
    "pretrain": pretrain,
    "report-schema": report_schema, "tasks-path": tasks_path,
}  # fmt: skip

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, help=(
        "Finds the retrieval heads of a pretrained Mamba and adds gated attention there: "
        "locate, plan, splice, tune, export, bench. `run` does all of it from one recipe."
    ),
)  # fmt: skip
for name, verb in VERBS.items():
    # After \b, click keeps the lines of a paragraph as they are.
    app.command(name, help=cleandoc(verb.__doc__ or "").replace("\n\nExamples:\n", "\n\n\b\nExamples:\n"))(verb)


def print_version(requested: bool) -> None:
    if requested:
        import importlib.metadata

        print(f"mamba-surgery {importlib.metadata.version('mamba-surgery')}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version, and exit.")]


@app.callback()
def options(version: Version = False) -> None:
    """Options that come before a verb."""


# What a disk may answer to any write, also one of a library's.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def main() -> None:
    """Entry point. A UserError, or a disk that is full, ends with one line on standard error and status 2, Ctrl-C with the
    command that goes on and status 130, SIGTERM likewise with 143."""
    hush_transformers()
    processes.of_the_command_line = True
    try:
        with listening(), until_the_end:
            app()
    except _user_errors() as error:
        line, status = f"surgery: {shown(' '.join(str(error).split()), LONGEST)}", 2
    except OSError as error:
        if error.errno not in DISK:
            raise
        place = f" {error.filename}" if error.filename else ""
        line, status = f"surgery: cannot write{place}: {error.strerror}", 2
    except Interrupted as stop:
        launched = several_processes()
        line = f"surgery: interrupted; to go on: {continuation(sys.argv, launched=launched)}"
        status = 128 + stop.number
    else:
        return
    finally:
        processes.of_the_command_line = False
    # Only here are the frames of the error gone, and with them a bar that was on the screen.
    if is_main():
        print(printable(line), file=sys.stderr)
    sys.exit(status)


def _user_errors() -> tuple[type[Exception], ...]:
    """What a user may cause. A KernelError's module is heavy; where it was not imported, none was raised."""
    dispatch = sys.modules.get("surgery.kernels.dispatch")
    return (UserError,) if dispatch is None else (UserError, dispatch.KernelError)
