"""Standard tasks, run by lm-evaluation-harness in this process on the live model.

A task is looked for in a folder of the user's (`bench.tasks_path`: YAML files, whose `data_files` may be local), then among
ours (`surgery/bench/tasks`), then among the harness's own, whose data come from the Hub or from its cache. The numbers are
those of `lm_eval --model hf` on the exported folder.
"""

import logging
from contextlib import redirect_stderr
from functools import cache
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.bench.cells import digest
from surgery.errors import UserError

FEWSHOT_SEED = 1234  # the command's
TASKS = Path(__file__).parent / "tasks"


def load(names: list[str], tasks_path: str | None) -> dict[str, list[Any]]:
    """Name -> the harness's tasks that it stands for: one, or a group's. Raises UserError for what cannot be loaded."""
    if find_spec("lm_eval") is None:
        raise UserError(f"the task {names[0]} needs lm-evaluation-harness: pip install 'mamba-surgery[eval]'")
    if tasks_path is not None and not Path(tasks_path).is_dir():
        raise UserError(f"bench.tasks_path: no such folder: {tasks_path}")
    return {name: _load(name, tasks_path) for name in names}


def identity(tasks: list[Any]) -> str:
    """A digest of what tasks ask: their definitions and their data."""
    return digest("\n".join(f"{task.dump_config()} {list(task.eval_docs)}" for task in tasks))


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: list[Any], batch_size: int, limit: int | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Per example of all tasks: the score, and a digest of what was asked. limit: examples of each task at most."""
    from lm_eval import evaluate as harness
    from lm_eval.models.huggingface import HFLM

    _quiet()
    for task in tasks:
        task.set_fewshot_seed(FEWSHOT_SEED)
    with redirect_stderr(StringIO()):  # its bars; one at a time: ours
        # The same length limit as the command's: none is passed.
        asker = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
        found = harness(asker, {"tasks": {task.config.task: task for task in tasks}}, limit=limit, bootstrap_iters=0)
    values: list[float] = []
    asked: list[str] = []
    for task in tasks:
        samples = found["samples"][task.config.task]
        metric = _metric(task)
        first = samples[0]["filter"]  # a task with several ways to read an answer lists the samples once for each
        for sample in samples:
            if sample["filter"] == first:
                values.append(float(sample[metric]))
                asked.append(digest(f"{sample['doc_hash']} {sample['arguments']} {sample['target_hash']}"))
    return np.array(values), tuple(asked)


def _load(name: str, tasks_path: str | None) -> list[Any]:
    manager = _manager(tasks_path, False)
    if name not in manager.all_tasks:
        manager = _manager(tasks_path, True)
    if name not in manager.all_tasks:
        raise UserError(f"no task is named '{name}', in lm-evaluation-harness or in {tasks_path or 'bench.tasks_path'}")
    try:
        with redirect_stderr(StringIO()):
            tasks = list(manager.load([name])["tasks"].values())
    except Exception as error:  # whatever its code or its data raise
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot load the task '{name}': {message}") from error
    for task in tasks:
        _metric(task)
        if task.config.num_fewshot is None:
            task.set_config(key="num_fewshot", value=0)
    return tasks


@cache
def _manager(tasks_path: str | None, own: bool) -> Any:
    """own: with the harness's tasks, thousands of files that take a while to read."""
    from lm_eval.tasks import TaskManager

    _quiet()
    return TaskManager(include_path=[TASKS, *([tasks_path] if tasks_path else [])], include_defaults=own)


def _metric(task: Any) -> str:
    """The metric whose mean is reported: the accuracy where there is one."""
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        raise UserError(f"the task '{task.config.task}' scores running text; the suite 'language' does that")
    metrics = [entry["metric"] for entry in task.config.metric_list]
    return "acc" if "acc" in metrics else metrics[0]


def _quiet() -> None:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
