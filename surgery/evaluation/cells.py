"""A cell: one model's results on one task with one seed, example by example. Finished cells are kept in a folder, each in a
file of its own, so that whatever ends a run early costs the cells that were being measured and no others.

What was asked is kept beside the results: a digest for every example, and one of all token rows that entered the model, taken
at its door. Two models are compared only where both agree, so that no model is given easier examples, or a hint, unnoticed.

A file's name is a digest of all that its content depends on, which it also holds, under a seal. What depends on anything
else is not found, and is measured anew; a file that is not what its name says, or was edited, is refused by its name.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.records.record import Sealed

PENDING = 64  # batches of token rows that wait for their digest


class Kept(Sealed):
    """What is measured at once. key: all that it depends on, by name; filled in when it is kept."""

    schema_version: int = 2
    key: dict[str, Any] = {}


Cells = TypeVar("Cells", bound=Kept)


class Cell(Kept):
    """values: one an example. asked: a digest of each example. inputs: a digest of what entered the model. part: of a group of
    the harness, which of its tasks."""

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


def kept(folder: Path | None, key: dict[str, Any], kind: type[Cells], measure: Callable[[], Cells]) -> Cells:
    """The cell (or what else is measured at once) from `folder` if it was finished there, else measured now and kept.

    key: JSON values. Raises UserError for a file that is not what its name says.
    """
    if folder is None:
        return measure()
    key = json.loads(json.dumps(key, default=str))
    path = folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"
    if path.exists():
        try:
            cell = kind.read(path, unsealed="refuse")
        except UserError as error:
            raise UserError(f"{error} (delete it, and it is measured again)") from error
        if other := next((name for name in {**key, **cell.key} if key.get(name) != cell.key.get(name)), None):
            raise UserError(f"{path} is not what its name says: it was measured with another {other}; delete it")
        return cell
    cell = measure().model_copy(update={"key": key})
    cell.write(path)
    return cell


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[Callable[[], str]]:
    """Yields what digests the token rows that have entered the model so far. Neither order, nor batches, nor the zeros at the
    end of a padded row count."""
    rows: set[bytes] = set()
    pending: list[Tensor] = []

    def note(_: Any, args: tuple, kwargs: dict) -> None:
        # A copy where they are: to bring them to the host at once would make it wait for a GPU in every forward.
        pending.append((kwargs["input_ids"] if "input_ids" in kwargs else args[0]).detach().clone())
        if len(pending) == PENDING:
            count()

    def count() -> None:
        for ids in pending:
            rows.update(hashlib.sha256(np.trim_zeros(row, "b").tobytes()).digest() for row in ids.cpu().numpy())
        pending.clear()

    def of_all() -> str:
        count()
        return hashlib.sha256(b"".join(sorted(rows))).hexdigest()[:16]

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield of_all
    finally:
        handle.remove()


def values(cells: list[Cell]) -> np.ndarray:
    """The per-example values of a task, all seeds."""
    return np.array([value for cell in cells for value in cell.values])


def check_same(base: list[Cell], model: list[Cell]) -> None:
    """Raise UserError unless both were asked the same."""
    for mine, other in zip(base, model, strict=True):
        where = next((i for i, (a, b) in enumerate(zip(mine.asked, other.asked, strict=False)) if a != b), None)
        if where is not None or len(mine.asked) != len(other.asked):
            which = f"example {where}" if where is not None else "the number of examples"
            raise UserError(f"{mine.model} and {other.model} were not asked the same in {mine.task}: {which} differs")
        if mine.inputs != other.inputs:
            raise UserError(f"{mine.model} and {other.model} were not asked the same in {mine.task}: they read other tokens")
