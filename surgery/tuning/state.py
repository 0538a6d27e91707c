"""Checkpoints of tuning: where a run is, and all that it needs to go on as if nothing had happened.

One folder each: `trained.safetensors` (and `best.safetensors`), `optimizer.pt` (optimiser, schedule), `state.json` (stage,
step, log, and the settings that the run must have). No random states: every step begins with its own (descent.py). A folder
gets its name only when it is complete, and loses its name before it is taken apart, so whenever the process ends, what is
called checkpoint-N is whole. Of several processes, the main one reads and writes.
"""

import io
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from surgery.errors import UserError
from surgery.runtime.processes import on_main
from surgery.tuning.shards import of_optimizer, to_optimizer

Log = list[dict[str, Any]]


@dataclass
class State:
    """Where a run is: `step` steps of `stage` are done. best: the step whose tensors are the best so far, and its figures."""

    stage: str
    step: int = 0
    log: Log = field(default_factory=list)
    best: dict[str, Any] | None = None


class Checkpoints:
    """Those of one run, in `out`; without a folder nothing is written.

    trained: what is saved and restored in place. settings: what must be the same when the run is resumed; JSON values.
    """

    def __init__(self, out: Path | None, trained: Mapping[str, nn.Parameter], settings: dict[str, Any]):
        self.out, self.trained, self.settings = out, trained, json.loads(json.dumps(settings))
        self.best: dict[str, Tensor] = {}
        self._optimizer: dict[str, Any] | None = None

    def begin(self, state: State, *, resume: bool) -> State:
        """The state to begin with: that of the newest checkpoint if there is one to resume, else `state`. What an earlier run
        left in the folder is removed if it is not to be resumed.

        Raises UserError if the checkpoint is not one of this run.
        """
        if self.out is None or (found := on_main(partial(self._read, resume))) is None:
            return state
        tensors, self.best, self._optimizer, state = found
        self.put(tensors)
        return state

    def _read(self, resume: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any], State] | None:
        assert self.out is not None
        for leftover in self.out.glob(".checkpoint-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        found = self._found()
        if not resume:
            for folder in found:
                _remove(folder)
        return self._load(found[-1]) if resume and found else None

    def save(self, state: State, optimizer: Any = None, schedule: Any = None) -> None:
        """Write checkpoint-<records in the log> and remove the older ones. Raises UserError, the older ones untouched, if it
        cannot be written."""
        if self.out is None:
            return
        training = {
            "optimizer": optimizer and of_optimizer(optimizer),
            "schedule": schedule and schedule.state_dict(),
        }
        on_main(partial(self._write, state, training))

    def _write(self, state: State, training: dict[str, Any]) -> None:
        assert self.out is not None
        target, temporary = self.out / f"checkpoint-{len(state.log)}", None
        buffer = io.BytesIO()
        torch.save(training, buffer)
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(dir=self.out, prefix=".checkpoint-"))
            _write(temporary / "trained.safetensors", save(self.tensors()))
            if self.best:
                _write(temporary / "best.safetensors", save(self.best))
            _write(temporary / "optimizer.pt", buffer.getbuffer())
            _write(temporary / "state.json", json.dumps({"state": asdict(state), "settings": self.settings}).encode())
            older = [folder for folder in self._found() if folder != target]
            if target.exists():
                _remove(target)
            os.replace(temporary, target)
        except OSError as error:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            intact = f"; {found[-1]} is intact" if (found := self._found()) else ""
            raise UserError(f"cannot write the checkpoint {target}: {error.strerror}{intact}") from error
        for folder in older:
            _remove(folder)

    def restore(self, optimizer: Any, schedule: Any) -> None:
        """Give optimiser and schedule what the checkpoint holds of them. Once; at the beginning of a stage there is nothing to
        restore."""
        found, self._optimizer = self._optimizer, None
        if found is not None and found["optimizer"] is not None:
            to_optimizer(found["optimizer"], optimizer)
            schedule.load_state_dict(found["schedule"])

    def tensors(self) -> dict[str, Tensor]:
        """A copy of what is trained, on the CPU."""
        return {name: p.detach().to("cpu", copy=True).contiguous() for name, p in self.trained.items()}

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        for name, p in self.trained.items():
            p.copy_(tensors[name])

    def _load(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any], State]:
        tensors = load_file(folder / "trained.safetensors")
        if {name: t.shape for name, t in tensors.items()} != {name: p.shape for name, p in self.trained.items()}:
            raise UserError(f"{folder} was made by another plan; begin anew with --overwrite, or choose another --out")
        found = json.loads((folder / "state.json").read_text())
        if differing := _first_difference(self.settings, found["settings"]):
            raise UserError(f"{folder} was made with another {differing}; begin anew with --overwrite, or choose another --out")
        best = {} if found["state"]["best"] is None else load_file(folder / "best.safetensors")
        training = torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu")
        return tensors, best, training, State(**found["state"])

    def _found(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        assert self.out is not None
        return sorted(self.out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def _first_difference(mine: dict[str, Any], other: dict[str, Any], prefix: str = "") -> str | None:
    """The dotted name of the first setting that is not the same in both."""
    for name in dict.fromkeys([*mine, *other]):
        one, two = mine.get(name), other.get(name)
        if one != two:
            inner = _first_difference(one, two, f"{prefix}{name}.") if isinstance(one, dict) and isinstance(two, dict) else None
            return inner or prefix + name
    return None


def _write(path: Path, content: bytes | memoryview) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # or a machine that fails might keep the name and lose the bytes


def _remove(folder: Path) -> None:
    """Remove a checkpoint; at no time is there a half of it under its name."""
    hidden = folder.with_name(f".{folder.name}")
    os.replace(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)
