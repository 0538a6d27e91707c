"""Standard tasks, by lm-evaluation-harness in this process on the live model: the numbers of `lm_eval --model hf`."""

import copy
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from surgery.errors import UserError
from surgery.evaluation.suites import Given, Measurement, digest
from surgery.models.tokens import without_end_token
from surgery.records.record import installed_version
from surgery.runtime.files import file_digest, settings_digest

METRICS = ("acc", "exact_match", "em", "f1", "contains", "acc_norm")  # the first that a task has


def harness_measurements(given: Given) -> list[Measurement]:
    """A measurement for each task of bench.tasks: one task, or all of a group, whose examples are pooled. Raises UserError
    where the harness is not installed, or knows no such task."""
    if not given.options.tasks:
        return []
    if find_spec("lm_eval") is None:
        raise UserError("bench.tasks needs lm-evaluation-harness: pip install 'lm_eval[hf]'")
    from lm_eval.tasks import TaskManager

    without_end_token(given.tokenizer)  # which refuses what cannot be asked
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names, folder = given.options.tasks, given.options.include_path
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"bench.include_path is {folder}, and there is no such folder")
    manager = TaskManager(include_path=folder, include_defaults=False) if folder is not None else None
    if manager is None or set(names) - set(manager.all_tasks):  # reading the list of its own tasks takes a minute
        manager = TaskManager(include_path=folder)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise UserError(f"lm-evaluation-harness knows no task '{unknown[0]}' (bench.tasks); `lm_eval ls tasks` lists them")
    return [_measurement(given, manager, name) for name in names]


def _measurement(given: Given, manager: Any, name: str) -> Measurement:
    options = given.options
    files = file_digest(options.include_path) if options.include_path is not None else ""
    first: list[str] = []  # what the first model was asked

    def ask(model: Any) -> np.ndarray:
        scores, asked = evaluate_task(model, given, manager, name)
        if first and asked != first:
            raise UserError(f"{name}: lm-evaluation-harness asked two models different questions")
        first[:] = asked
        return scores

    words = [given.tokenizer.name_or_path, settings_digest(given.tokenizer.get_vocab())]
    seen = [name, installed_version("lm_eval"), options.task_limit, files, words]
    return Measurement(f"task.{name}", name, name, "accuracy", digest(seen), ask)


def evaluate_task(model: Any, given: Given, manager: Any, name: str) -> tuple[np.ndarray, list[str]]:
    """(the score of each example, (n,), a digest of each). Raises UserError for a task whose data cannot be had, or without a
    score from 0 to 1."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    words = copy.deepcopy(without_end_token(given.tokenizer))  # HFLM gives it a pad token
    asker = HFLM(pretrained=model, tokenizer=words, backend="causal", batch_size=given.options.batch_size)
    try:
        found = simple_evaluate(
            model=asker,
            tasks=[name],
            limit=given.options.task_limit,
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=0,
            random_seed=given.seed,
            numpy_random_seed=given.seed,
            torch_random_seed=given.seed,
            verbosity="ERROR",
        )
    except (OSError, ValueError, ImportError, ConnectionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"lm-evaluation-harness cannot run {name}: {reason[:300]}") from error
    by_task = [found["samples"][task] for task in sorted(found["samples"])]
    # A task with several ways to read an answer lists its samples once for each: the first way counts.
    samples = [sample for each in by_task for sample in each if sample.get("filter") == each[0].get("filter")]
    metric = next((each for each in METRICS if samples and isinstance(samples[0].get(each), int | float)), None)
    if metric is None:
        raise UserError(f"{name} has no score that bench knows ({', '.join(METRICS)})")
    asked = [f"{sample['doc_hash']} {sample['prompt_hash']} {sample['target_hash']}" for sample in samples]
    return np.array([float(sample[metric]) for sample in samples]), asked
