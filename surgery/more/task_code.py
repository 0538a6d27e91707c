"""Whether tasks of lm-evaluation-harness bring code. The harness runs it: functions that a task's YAML names by a tag, metrics
that it does not know, which the package `evaluate` loads as programs, and expressions in templates, which its Jinja evaluates
with all of Python in reach.

It is looked for in the files before anything is loaded, and stopped once more where the harness would run it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from surgery.errors import UserError
from surgery.more import TASKS
from surgery.records.reading import files_below
from surgery.runtime.consent import consent

PICKLES = ("pandas",)  # what `datasets` reads with pickle
HOW = "read it, and if you trust it, give --trust-task-code (a dry run runs none)"


def check_task_code(folder: str) -> None:
    """Raise UserError for a folder of tasks with code, unless there is consent. Nothing of it is run to find out."""
    if consent().task_code:
        return
    # By the end of the name: a file named .yaml has no suffix, and the harness reads it.
    todo = [path.resolve() for path in files_below(folder, "bench.include_path") if path.name.endswith((".yaml", ".yml"))]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        try:
            content = path.read_bytes()  # whose encoding YAML finds out, as it does for the harness
            if any(isinstance(token, yaml.TagToken) for token in yaml.scan(content)):
                raise UserError(f"bench.include_path: {path} names code to be run; {HOW}")
            tree = yaml.safe_load(content)
        except (OSError, ValueError, yaml.YAMLError):
            continue  # which the harness cannot read either, and says
        included = tree.get("include", []) if isinstance(tree, dict) else []
        todo += [(path.parent / str(name)).resolve() for name in (included if isinstance(included, list) else [included])]
        if any(str(data) in PICKLES for data in _values(tree, "dataset_path")):
            raise UserError(f"bench.include_path: {path} reads pickles, which can run code; {HOW}")


def _values(tree: Any, key: str) -> Iterator[Any]:
    """The values of a key, anywhere in a tree: groups hold tasks of their own."""
    if isinstance(tree, dict):
        if key in tree:
            yield tree[key]
        tree = list(tree.values())
    if isinstance(tree, list):
        for each in tree:
            yield from _values(each, key)


@contextmanager
def without_task_code() -> Iterator[None]:
    """Meanwhile the harness runs its own code and ours alone, and its templates reach nothing but the values of an example,
    unless there is consent. Raises UserError for what would run."""
    import lm_eval
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval import utils
    from lm_eval.api import metrics as _fills_the_registry  # noqa: F401
    from lm_eval.api import registry, task
    from lm_eval.tasks import _yaml_loader

    if consent().task_code:
        yield
        return
    own: Any = utils.env
    function, metric = _yaml_loader._import_func_in_yml, task.get_metric
    known = [Path(TASKS).resolve(), Path(str(lm_eval.__file__)).resolve().parent]

    def import_function(name: str, folder: Path) -> Any:
        if not any(Path(folder).resolve().is_relative_to(place) for place in known):
            raise UserError(f"a task in {folder} names code to be run, {name}; {HOW}")
        return function(name, folder)

    def get_metric(name: str, hf_evaluate_metric: bool = False) -> Any:
        if hf_evaluate_metric or name not in registry.metric_registry:
            raise UserError(f"its metric '{name}' is a program of others, from the Hub or a folder; {HOW}")
        return metric(name)

    sandbox = ImmutableSandboxedEnvironment(loader=own.loader, undefined=own.undefined, keep_trailing_newline=True)
    sandbox.filters.update(own.filters)
    utils.env, _yaml_loader._import_func_in_yml, task.get_metric = sandbox, import_function, get_metric
    try:
        yield
    finally:
        utils.env, _yaml_loader._import_func_in_yml, task.get_metric = own, function, metric
