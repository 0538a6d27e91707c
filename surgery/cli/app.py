"""The command line: parses, calls, prints. A file per verb; what a verb does is in the packages that it imports once called.

Nothing here, and nothing at the top of a verb's file, imports torch, transformers or another package that takes long: `--help`
and a typo answer at once.
"""

import sys
from contextvars import copy_context

import typer

from surgery.cli.bench import bench
from surgery.cli.doctor import doctor
from surgery.cli.export import export
from surgery.cli.lists import report_schema, tasks_path
from surgery.cli.locate import locate
from surgery.cli.plan import plan
from surgery.cli.pretrain import pretrain
from surgery.cli.prune import prune
from surgery.cli.publish import publish
from surgery.cli.run import run
from surgery.cli.settings import list_names, settings
from surgery.cli.splice import splice
from surgery.cli.tune import tune
from surgery.errors import UserError
from surgery.runtime.processes import is_main
from surgery.runtime.quiet import hush_transformers

# In the order of --help: the pipeline first.
VERBS = (run, locate, prune, plan, splice, tune, export, publish, bench, report_schema, tasks_path, doctor, pretrain)

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=(
        "Finds the retrieval heads of a pretrained Mamba and splices attention in their place: "
        "locate, plan, splice, tune, export, bench. `run` does all of it from one recipe."
    ),
)  # fmt: skip
for verb in VERBS:
    app.command()(verb)
app.command("settings")(settings)
app.command("list")(list_names)


def main() -> None:
    """Entry point. A UserError ends with its one line on standard error and status 2."""
    hush_transformers()
    try:
        copy_context().run(app)  # in a context of its own, so that the backends it asks for are not asked for afterwards
    except _user_errors() as error:
        if is_main():
            print(f"surgery: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def _user_errors() -> tuple[type[Exception], ...]:
    """What a user may cause. A KernelError's module is heavy; where it was not imported, none was raised."""
    dispatch = sys.modules.get("surgery.kernels.dispatch")
    return (UserError,) if dispatch is None else (UserError, dispatch.KernelError)
