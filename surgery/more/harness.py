"""Standard tasks, run by lm-evaluation-harness in this process on the live model.

A task is looked for in a folder of the user's (`bench.include_path`: YAML files, whose `data_files` may be local), then among
ours (`surgery/more/tasks`), then among the harness's own. A data set is looked for in another folder of the user's
(`bench.data_path`) under its Hub id, `cais/mmlu/`: a repository as it is on the Hub, or other files with a README.md that says,
as there, which configuration and split each one is; then on the Hub or in its cache. The numbers are those of `lm_eval --model
hf` on the exported folder.
"""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import cache
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.cells import digest
from surgery.models.finite import explained, watching_logits
from surgery.models.tokens import prompting
from surgery.more import TASKS
from surgery.more.task_code import check_task_code, without_task_code

FEWSHOT_SEED = 1234  # the command's
NORMED = "acc_norm"


def load(names: list[str], include_path: str | None = None, data_path: str | None = None) -> dict[str, list[Any]]:
    """By name, the harness's tasks: one, or all of a group or a tag, whose examples are pooled. Raises UserError for a name
    that cannot be loaded."""
    if find_spec("lm_eval") is None:
        raise UserError(f"the task {names[0]} needs lm-evaluation-harness: pip install 'mamba-surgery[eval]'")
    for option, path in (("include_path", include_path), ("data_path", data_path)):
        if path is not None and not Path(path).is_dir():
            raise UserError(f"bench.{option}: no such folder: {path}")
    if include_path is not None:
        check_task_code(include_path)
    return {name: _load(name, include_path, data_path) for name in names}


def identity(task: Any) -> str:
    """A digest of what a task asks: its definition and its data, those of the examples before a question included."""
    shots = list(task.fewshot_docs()) if task.config.num_fewshot else []
    return digest(f"{task.dump_config()} {list(task.eval_docs)} {shots}")


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Any, batch_size: int, limit: int | None
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Per example of a task: the score that is reported, and acc_norm where the task has it, by metric; and a digest of what
    was asked. limit: examples at most."""
    from lm_eval import evaluate as harness

    from surgery.more.harness_model import Ends

    _quiet()
    name, metric = task.config.task, _metric(task)
    task.set_fewshot_seed(FEWSHOT_SEED)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UserError(f"the task {name}: lm-evaluation-harness needs a tokenizer with a BOS or an EOS token")
    tokenizer = prompting(tokenizer)
    if tokenizer.pad_token is None:  # the harness would set one, also for the caller
        tokenizer = copy.deepcopy(tokenizer)
    # No bars of its own beside ours.
    with explained(model), watching_logits(model), redirect_stderr(StringIO()), without_task_code():
        # The same length limit as the command's: none is passed.
        asker = Ends(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
        samples = harness(asker, {"tasks": {name: task}}, limit=limit, bootstrap_iters=0)["samples"][name]
    first = samples[0]["filter"]  # a task with several ways to read an answer lists the samples once for each
    samples = [sample for sample in samples if sample["filter"] == first]
    prompts = (digest(f"{sample['doc_hash']} {sample['arguments']} {sample['target_hash']}") for sample in samples)
    metrics = [metric, *(name for name in (NORMED,) if name in samples[0])]
    return {each: np.array([float(sample[each]) for sample in samples]) for each in metrics}, tuple(prompts)


@cache
def _load(name: str, include_path: str | None, data_path: str | None) -> list[Any]:
    manager = _manager(include_path, False)
    if not _holds(manager, name):
        manager = _manager(include_path, True)
    if name not in manager.all_tasks:
        raise UserError(f"no task is named '{name}', in lm-evaluation-harness or in {include_path or 'bench.include_path'}")
    try:
        with redirect_stderr(StringIO()), _local(data_path), without_task_code():
            loaded = manager.load([name])
    except UserError as error:
        raise UserError(f"the task '{name}': {error}") from error
    except Exception as error:  # whatever its code or its data raise
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot load the task '{name}': {message}") from error
    for group in loaded.get("groups", {}).values():
        if not all(entry.weight_by_size for entry in group.aggregate_metric_list or ()):
            raise UserError(f"the group '{group.name}' counts its tasks alike, whatever their size; name the tasks instead")
    for task in loaded["tasks"].values():
        _metric(task)
        if task.config.num_fewshot is None:
            task.set_config(key="num_fewshot", value=0)
    return list(loaded["tasks"].values())


@contextmanager
def _local(data_path: str | None) -> Iterator[None]:
    """The harness asks `datasets` for data by name: while this lasts, a folder of that name in `data_path` is read instead."""
    import datasets

    given = datasets.load_dataset

    def load_dataset(path: str, *args: Any, **kwargs: Any) -> Any:
        if data_path is None or not (folder := Path(data_path, path).resolve()).is_dir():
            return given(path, *args, **kwargs)
        # datasets (5.2) knows a folder in its cache by its name alone, whatever it holds: each content needs its own cache.
        files = [(str(file), file.stat().st_mtime_ns) for file in sorted(folder.rglob("*"))]
        cache = Path(datasets.config.HF_DATASETS_CACHE, f"folder-{digest(str(files))}")
        return given(str(folder), *args, cache_dir=str(cache), **kwargs)

    datasets.load_dataset = load_dataset
    try:
        yield
    finally:
        datasets.load_dataset = given


def _holds(manager: Any, name: str) -> bool:
    """Whether it knows a name and, if that is a group's, all that this refers to."""
    if (entry := manager.task_index.get(name)) is None:
        return False
    members = entry.cfg.get("task") if entry.kind.name == "GROUP" else ()
    if not isinstance(members, list):
        return True
    return all(_holds(manager, one if isinstance(one, str) else one.get("group") or one.get("task")) for one in members)


@cache
def _manager(include_path: str | None, own: bool) -> Any:
    """own: with the harness's tasks, thousands of files that take a while to read."""
    from lm_eval.tasks import TaskManager

    _quiet()
    return TaskManager(include_path=[TASKS, *([Path(include_path).resolve()] if include_path else [])], include_defaults=own)


def _metric(task: Any) -> str:
    """The metric whose mean is reported: the accuracy where there is one."""
    from lm_eval.api.registry import get_aggregation

    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        raise UserError(f"the task '{task.config.task}' scores running text; the suite 'language' does that")
    metrics = task.aggregation()
    name = "acc" if "acc" in metrics else next(iter(metrics))
    if metrics[name] not in (get_aggregation("mean"), np.mean):
        raise UserError(f"the task '{task.config.task}' is scored as a whole ({name}), not by a mean over examples")
    return name


def _quiet() -> None:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
