"""A cell: one model's results on one task with one seed, example by example. Finished cells are kept in a folder, each in a
file of its own, so that whatever ends a run early costs the cells that were being measured and no others.

What was asked is kept beside the results: a digest for every example, and one of all token rows that entered the model, taken
at its door. Two models are compared only where both agree, so that no model is given easier examples, or a hint, unnoticed.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.records import Record, toolkit

Kept = TypeVar("Kept", bound=Record)
# What a config says about a file and not about the function.
UNRELATED = ("_name_or_path", "transformers_version", "architectures", "auto_map", "dtype")


class Cell(Record):
    """values: one an example. asked: a digest of each example. inputs: a digest of what entered the model. part: of a group of
    the harness, which of its tasks."""

    schema_version: int = 1
    model: str
    task: str
    part: str
    seed: int
    metric: Literal["accuracy", "loss"]
    inputs: str
    asked: tuple[str, ...]
    values: tuple[float, ...]


def digest(text: str) -> str:
    """A short one."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def model_digest(model: PreTrainedModel) -> str:
    """What distinguishes one model from another: its configuration and its parameters, grafts included."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in UNRELATED}
    total = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.named_parameters()):
        total.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        total.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def kept(folder: Path | None, identity: str, kind: type[Kept], measure: Callable[[], Kept]) -> Kept:
    """The cell (or what else is measured at once) from `folder` if this version of the package finished it there, else measured
    now and kept."""
    if folder is None:
        return measure()
    path = folder / f"{hashlib.sha256(f'{toolkit()} {identity}'.encode()).hexdigest()[:32]}.json"
    if path.exists():
        return kind.read(path)
    found = measure()
    found.write(path)
    return found


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[Callable[[], str]]:
    """Yields what digests the token rows that have entered the model so far. Neither order, nor batches, nor the zeros at the
    end of a padded row count."""
    rows: set[bytes] = set()

    def note(_: Any, args: tuple, kwargs: dict) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        for row in ids.cpu().numpy():
            rows.add(hashlib.sha256(np.trim_zeros(row, "b").tobytes()).digest())

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield lambda: hashlib.sha256(b"".join(sorted(rows))).hexdigest()[:16]
    finally:
        handle.remove()


def values(cells: list[Cell]) -> np.ndarray:
    """The per-example values of a task, all seeds."""
    return np.array([value for cell in cells for value in cell.values])


def check_same(base: list[Cell], model: list[Cell]) -> None:
    """Raise UserError unless both were asked the same."""
    for one, other in zip(base, model, strict=True):
        where = next((i for i, (a, b) in enumerate(zip(one.asked, other.asked, strict=False)) if a != b), None)
        if where is not None or len(one.asked) != len(other.asked):
            which = f"example {where}" if where is not None else "the number of examples"
            raise UserError(f"{one.model} and {other.model} were not asked the same in {one.task}: {which} differs")
        if one.inputs != other.inputs:
            raise UserError(f"{one.model} and {other.model} were not asked the same in {one.task}: they read other tokens")
