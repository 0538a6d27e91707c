"""What was measured batch by batch: shared between processes, and kept in files until the ranking is written.

A file holds the tensors of one batch. Its name is a digest of all that they depend on: the weights, the tokens of the batch,
what was ablated and how, kernels and code. So a file of that name can be used instead of measuring again, whichever process
wrote it, and a file of anything else has another name. A seal in the file, over name and tensors, shows if it was renamed or
edited.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from surgery.errors import UserError
from surgery.models.answers import tensor_digest
from surgery.probes.encoded import Encoded
from surgery.runtime import processes
from surgery.runtime.ownership.files import put

Tensors = dict[str, Tensor]
Key = Callable[[int], Any]  # of a batch's number: what its tensors depend on (JSON)
Measure = Callable[[int], Tensors]


class Ledger:
    """folder: for the files; None: nothing is kept. key: what all measurements here depend on (JSON)."""

    def __init__(self, folder: Path | None = None, *key: Any):
        self.folder, self.key = folder, _sha(key)

    def extended(self, *key: Any) -> "Ledger":
        """A ledger in the same folder for measurements that depend on more."""
        return Ledger(self.folder, self.key, *key)

    def share(self, numbers: Iterable[int], key: Key, measure: Measure) -> dict[int, Tensors]:
        """This process's share of the batches `numbers`, read or measured."""
        return {number: self.tensors(number, key, measure) for number in processes.share(sorted(numbers))}

    def gather(self, numbers: Iterable[int], key: Key, measure: Measure) -> dict[int, Tensors]:
        """All the batches `numbers`, in order, from whichever processes have them."""
        return gathered(self.share(numbers, key, measure))

    @contextmanager
    def on_disk(self) -> Iterator["Ledger"]:
        """A ledger that holds nothing in memory: this one, or, if it keeps nothing, one in a folder that is then removed."""
        if self.folder is not None:
            yield self
            return
        with tempfile.TemporaryDirectory() as folder:
            yield Ledger(Path(folder), self.key)

    def tensors(self, number: int, key: Key, measure: Measure) -> Tensors:
        """One batch's, read or measured."""
        if self.folder is None:
            return measure(number)
        path = self.folder / f"{_sha([self.key, key(number)])}.safetensors"
        if path.exists():
            return _read(path)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in measure(number).items()}
        _save(tensors, path)
        return tensors


def gathered(mine: dict[int, Tensors]) -> dict[int, Tensors]:
    """The tensors of all processes, by number, in order."""
    return dict(sorted(processes.gather(list(mine.items()))))


def digest(encoded: Encoded) -> str:
    """Identifies the questions of a batch, as the model sees them."""
    return _sha(encoded.seen())


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _seal(tensors: Tensors, path: Path) -> dict[str, str]:
    return {"seal": _sha([path.name, {name: tensor_digest(tensor) for name, tensor in tensors.items()}])}


def _read(path: Path) -> Tensors:
    try:
        with safe_open(path, framework="pt") as file:
            tensors, seal = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}; delete it, and it is measured again") from error
    if seal != _seal(tensors, path):
        changed = f"{path} was changed after it was written: its content does not fit its seal"
        raise UserError(f"{changed}; delete it, and it is measured again")
    return tensors


def _save(tensors: Tensors, path: Path) -> None:
    """A reader sees the whole file or none."""
    put(path, save(tensors, metadata=_seal(tensors, path)))
