"""Whether tasks of lm-evaluation-harness bring code. The harness runs it: functions that a task's YAML names by a tag, and
expressions in its templates, which its Jinja evaluates with all of Python in reach."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from surgery.errors import UserError
from surgery.records.reading import files_below
from surgery.runtime.consent import consent

PICKLES = ("pandas",)  # what `datasets` reads with pickle


def check_task_code(folder: str) -> None:
    """Raise UserError for a folder of tasks with code, unless there is consent. Nothing of it is run to find out."""
    if consent().task_code:
        return
    todo = [path.resolve() for path in files_below(folder, "bench.include_path") if path.suffix in (".yaml", ".yml")]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        try:
            text = path.read_text(encoding="utf-8")
            if any(isinstance(token, yaml.TagToken) for token in yaml.scan(text)):
                raise UserError(
                    f"bench.include_path: {path} names code to be run; read it, and if you trust it, give --trust-task-code"
                )
            tree = yaml.safe_load(text)
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            continue  # which the harness cannot read either, and says
        included = tree.get("include", []) if isinstance(tree, dict) else []
        todo += [(path.parent / str(name)).resolve() for name in (included if isinstance(included, list) else [included])]
        if isinstance(tree, dict) and str(tree.get("dataset_path")) in PICKLES:
            raise UserError(
                f"bench.include_path: {path} reads pickles, which can run code; if you trust them, give --trust-task-code"
            )


@contextmanager
def templates_in_a_sandbox() -> Iterator[None]:
    """Meanwhile the harness's templates reach nothing but the values of an example, unless there is consent."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval import utils

    own: Any = utils.env
    if consent().task_code:
        yield
        return
    sandbox = ImmutableSandboxedEnvironment(loader=own.loader, undefined=own.undefined, keep_trailing_newline=True)
    sandbox.filters.update(own.filters)
    utils.env = sandbox
    try:
        yield
    finally:
        utils.env = own
