"""The command line. A file a command; each parses, checks what costs nothing to check, and calls one public function.

Nothing at the top of these files imports torch or transformers: `--help`, `surgery list` and a typo answer at once.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any

import typer
import typer.core

from surgery.cli.bench import bench
from surgery.cli.check import check, doctor
from surgery.cli.export import export
from surgery.cli.list import list_names
from surgery.cli.locate import locate
from surgery.cli.look import look
from surgery.cli.plan import plan
from surgery.cli.publish import publish
from surgery.cli.run import run
from surgery.cli.splice import splice
from surgery.cli.tune import tune
from surgery.errors import UserError, did_you_mean
from surgery.runtime.progress import printable, say

LONGEST = 1500  # characters of a message about an input that may itself be long
GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Start here": {"look": look, "run": run, "check": check},
    "Step by step": {"locate": locate, "plan": plan, "splice": splice, "tune": tune, "bench": bench},
    "Results": {"export": export, "publish": publish},
    "Names and settings": {"list": list_names, "doctor": doctor},
}
RESUMABLE = ("run", "tune", "bench")
HELP = {"help_option_names": ["-h", "--help"]}


class Groups(typer.core.TyperGroup):
    """Lists the commands in the order of use, and refuses another one in our words."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and not args[0].startswith("-"):
            raise UserError(
                f"there is no command {args[0]}{did_you_mean(args[0], self.commands) or '; `surgery -h` lists them'}"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: object, formatter: object) -> None:
        for group, verbs in GROUPS.items():
            with formatter.section(group):  # type: ignore[attr-defined]
                formatter.write_dl([(name, cleandoc(verb.__doc__ or "").partition("\n")[0]) for name, verb in verbs.items()])  # type: ignore[attr-defined]


app = typer.Typer(
    cls=Groups,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=HELP,
    help="Finds the retrieval heads of a pretrained Mamba, and adds gated attention there.",
)
for verbs in GROUPS.values():
    for name, verb in verbs.items():
        text = cleandoc(verb.__doc__ or "").replace("\n\nExamples:\n", "\n\n\b\nExamples:\n")  # \b keeps the lines as they are
        app.command(name, help=text, context_settings=HELP)(verb)


def print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(f"mamba-surgery {version('mamba-surgery')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version.")
    ] = False,
) -> None:
    """Options that come before a command."""


def main() -> None:
    """Entry point. Whatever ends a command is one line on standard error: bad input with status 2, Ctrl-C with the command that
    goes on and status 130."""
    os.environ.setdefault("USE_HUB_KERNELS", "0")  # a configuration names no kernels that are then fetched
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # what the terminal cannot show ends nothing
    try:
        os.getcwd()
        status = app(standalone_mode=False)
    except FileNotFoundError as error:
        status = _end(
            f"the current folder does not exist any more: {error}" if error.filename is None else _unexpected(error), 2
        )
    except UserError as error:
        status = _end(str(error), 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that nothing is written to the pipe at exit
        status = 1
    except BaseException as error:
        if isinstance(error, SystemExit) or os.environ.get("SURGERY_TRACEBACK"):
            raise
        if hasattr(error, "format_message"):  # the command line itself is wrong
            if type(error).__name__ == "NoArgsIsHelpError":  # `surgery` alone: its message is the help
                print(error.format_message())
                sys.exit(2)
            status = _end(_complaint(error), 2)
        elif type(error).__name__ == "PanicException":  # of the library tokenizers; it is no Exception
            status = _end(
                f"the tokenizer cannot be used: its library fails with '{error}'; check the model's tokenizer.json", 2
            )
        else:
            status = _end(_unexpected(error), 2)
    if status == 130:
        words = [word for word in sys.argv[1:] if word not in ("--overwrite", "--resume")]
        more = f"; to go on: surgery {shlex.join(words)} --resume" if words and words[0] in RESUMABLE else ""
        status = _end(f"interrupted{more}", 130)
    sys.exit(status if isinstance(status, int) else 0)


def _unexpected(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot use {error.filename}: {error.strerror}"
    first = (str(error).strip().splitlines() or ["no message"])[0]
    if "No space left on device" in first:  # some libraries have errors of their own for it
        return f"the disk is full: {first}"
    if isinstance(error, MemoryError) or "allocate memory" in first or "out of memory" in first:
        return f"there is not enough memory: {first}; lower sizes of batches or lengths"
    return f"{type(error).__name__}: {first} (SURGERY_TRACEBACK=1 shows where; please report it)"


def _complaint(error: Any) -> str:
    """What is wrong with the command line itself; typer's words differ from version to version."""
    kind, message, context = type(error).__name__, error.format_message().rstrip("."), getattr(error, "ctx", None)
    verb = next((word for word in sys.argv[1:2] if not word.startswith("-")), "")
    see = f" (see `{f'surgery {verb}'.strip()} -h`)"
    name = next(iter(re.findall(r"'([^']+)'", message)), "")
    if kind == "NoSuchOption":
        options = [option for each in context.command.params for option in each.opts if option[0] == "-"] if context else []
        return f"there is no option {error.option_name}{did_you_mean(error.option_name, options) or see}"
    if kind == "MissingParameter":
        return f"{name} is missing{see}"
    if kind == "BadOptionUsage":
        return f"{name} {'needs a value' if 'requires' in message else 'takes no value'}{see}"
    if kind == "BadParameter":
        said = message.partition(": ")[2].partition(",")[0].replace("Input should", "it should")
        return f"{name} has a wrong value: {said}{see}"
    if "unexpected extra argument" in message:
        return f"too many arguments: {message.rpartition('(')[2].rstrip(')')}{see}"
    return message + see


def _end(line: str, status: int) -> int:
    text = " ".join(line.split())
    say(printable(f"surgery: {text if len(text) <= LONGEST else text[:LONGEST] + ' ...'}"))
    return status
