"""What was measured batch by batch: shared between processes, and kept in files until the ranking is written.

A file holds the tensors of one batch. Its name is a digest of all that they depend on (the weights, the tokens of the batch,
what was ablated and how, kernels and code), so that whoever finds it can take it for what he would measure himself, whatever
number of processes made it, and one that is of something else is not found. A seal in the file, over name and tensors, tells
one that was renamed or edited.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from surgery.errors import UserError
from surgery.models.answers import described
from surgery.probes.scoring import Encoded
from surgery.records.record import sweep
from surgery.runtime import processes

Tensors = dict[str, Tensor]
What = Callable[[int], Any]  # of a batch's number: what its tensors depend on (JSON)
Measure = Callable[[int], Tensors]


class Ledger:
    """folder: for the files; None: nothing is kept. key: what everything that is measured here depends on (JSON)."""

    def __init__(self, folder: Path | None = None, *key: Any):
        self.folder, self.key = folder, _sha(key)

    def under(self, *key: Any) -> "Ledger":
        """The same, for what depends on more."""
        return Ledger(self.folder, self.key, *key)

    def share(self, numbers: Iterable[int], what: What, measure: Measure) -> dict[int, Tensors]:
        """This process's share of the batches `numbers`, read or measured."""
        return {number: self._one(number, what, measure) for number in processes.share(sorted(numbers))}

    def every(self, numbers: Iterable[int], what: What, measure: Measure) -> dict[int, Tensors]:
        """All the batches `numbers`, in order, from whichever processes have them."""
        return gathered(self.share(numbers, what, measure))

    def _one(self, number: int, what: What, measure: Measure) -> Tensors:
        if self.folder is None:
            return measure(number)
        path = self.folder / f"{_sha([self.key, what(number)])}.safetensors"
        if path.exists():
            return _read(path)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in measure(number).items()}
        _save(tensors, path)
        return tensors


def gathered(mine: dict[int, Tensors]) -> dict[int, Tensors]:
    """By number, in order, from all processes."""
    return dict(sorted(processes.gather(list(mine.items()))))


def digest(encoded: Encoded) -> str:
    """Identifies the questions of a batch, as the model sees them."""
    seen = [encoded.rows, encoded.terms.tolist(), encoded.choices.tolist(), encoded.answers.tolist()]
    return _sha(seen)


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _seal(tensors: Tensors, path: Path) -> dict[str, str]:
    return {"seal": _sha([path.name, {name: described(tensor) for name, tensor in tensors.items()}])}


def _read(path: Path) -> Tensors:
    try:
        with safe_open(path, framework="pt") as file:
            tensors, seal = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}; run without --resume") from error
    if seal != _seal(tensors, path):
        raise UserError(f"{path} is not what its name says: its content does not fit its seal; run without --resume")
    return tensors


def _save(tensors: Tensors, path: Path) -> None:
    """A reader sees the whole file or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(descriptor)
        save_file(tensors, temporary, metadata=_seal(tensors, path))
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
