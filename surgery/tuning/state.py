"""Checkpoints of tuning, and of pretraining on text: the state of a run, and all that it needs to end as if it had not been
interrupted.

A checkpoint is a folder: `trained.safetensors` (and `best.safetensors`), `optimizer.pt` (optimizer and schedule), `state.json`
(step, log, and the settings of the run). It holds no random states, since every step seeds its own (steps.py). A folder gets
its name only when it is complete, and loses it before it is removed, so a folder called checkpoint-N is always whole. Of
several processes, only the main one reads and writes.

accelerate's save_state would write the whole model and its teacher, thousands of times as much as the trained tensors, and
would not replace the previous checkpoint in one step.
"""

import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from surgery.errors import UserError
from surgery.loading.hub import one_line
from surgery.records.reading import check_plain, parse_json
from surgery.records.record import read_text
from surgery.runtime.ownership.complaints import reason, refuse
from surgery.runtime.ownership.files import check_ours, governing, remove
from surgery.runtime.ownership.replacing import building
from surgery.runtime.processes import on_main
from surgery.runtime.progress import say
from surgery.tuning.shards import load_optimizer_state, optimizer_state

Log = list[dict[str, Any]]
CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass
class State:
    """The state of a run: `step` steps are done. done: nothing is left to do. best: the best step so far, and its figures.
    curve: what tune.steps=auto knows so far. more: what pretraining knows beside."""

    step: int = 0
    done: bool = False
    log: Log = field(default_factory=list)
    best: dict[str, Any] | None = None
    curve: dict[str, Any] | None = None
    more: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run, in `out`; without a folder nothing is written.

    trained: the parameters that are saved, and restored in place. settings: JSON values that must be the same in a resumed run.
    anew, left: how to begin anew, and what goes on from what is left, for messages.
    """

    def __init__(
        self, out: Path | None, trained: Mapping[str, nn.Parameter], settings: dict[str, Any], *,
        anew: str = "begin anew with --overwrite", left: str = "--resume goes on",
    ):  # fmt: skip
        self.out, self.trained, self.settings = out, trained, json.loads(json.dumps(settings))
        self.anew, self.left = anew, left
        self.best: dict[str, Tensor] = {}
        self._optimizer: dict[str, Any] | None = None

    def begin(self, state: State, *, resume: bool) -> State:
        """The state to begin with: with `resume`, that of the newest checkpoint if there is one; else the given state. Without
        `resume`, the checkpoints of an earlier run are removed. Raises UserError if the checkpoint belongs to another run."""
        if self.out is None or (checkpoint := on_main(partial(self._read, resume))) is None:
            return state
        tensors, self.best, self._optimizer, state = checkpoint
        self.put(tensors)
        return state

    def _read(self, resume: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any], State] | None:
        assert self.out is not None
        ours = complete(self.out)
        refuse({*self.out.glob("checkpoint-*")} - {*ours})  # before hours of training end at the name that is taken
        newest = self._load(ours[-1]) if resume and ours else None
        check_ours(*ours)  # those that will be removed
        for folder in ours[:-1] if resume else ours:  # a process may have been killed before it removed the older ones
            remove(folder)
        return newest

    def save(self, state: State, optimizer: Any = None, schedule: Any = None) -> None:
        """Write checkpoint-<steps> and remove the older ones. Raises UserError, the older ones untouched, if it
        cannot be written."""
        if self.out is None:
            return
        training = {
            "optimizer": optimizer and optimizer_state(optimizer),
            "schedule": schedule and schedule.state_dict(),
        }
        on_main(partial(self._write, state, training))

    def _write(self, state: State, training: dict[str, Any]) -> None:
        assert self.out is not None
        target = self.out / f"checkpoint-{state.step}"
        buffer = io.BytesIO()
        torch.save(training, buffer)
        try:
            with building(target) as new:
                with new.filling() as temporary:
                    _write(temporary / "trained.safetensors", save(self.tensors()))
                    if self.best:
                        _write(temporary / "best.safetensors", save(self.best))
                    _write(temporary / "optimizer.pt", buffer.getbuffer())
                    _write(temporary / "state.json", json.dumps({"state": asdict(state), "settings": self.settings}).encode())
                new.replace()
        except OSError as error:
            intact = f"; {ours[-1]} is intact" if (ours := complete(self.out)) else ""
            raise UserError(f"cannot write the checkpoint {target}: {reason(error)}{intact}") from error
        for folder in complete(self.out):
            if folder != target:
                try:
                    remove(folder)
                except UserError as error:  # somebody has changed it meanwhile: no reason to end the run
                    say(f"note: {error}")

    def restore(self, optimizer: Any, schedule: Any) -> None:
        """Load the checkpoint's state of optimizer and schedule, the first time that this is called after a resume. The
        last checkpoint has none."""
        training, self._optimizer = self._optimizer, None
        if training is not None and training["optimizer"] is not None:
            load_optimizer_state(training["optimizer"], optimizer)
            schedule.load_state_dict(training["schedule"])

    def tensors(self) -> dict[str, Tensor]:
        """A copy of the trained tensors on the CPU."""
        return {name: p.detach().to("cpu", copy=True).contiguous() for name, p in self.trained.items()}

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        for name, p in self.trained.items():
            p.copy_(tensors[name])

    def _load(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any], State]:
        try:
            for file in folder.iterdir():
                check_plain(file)
            return self._contents(folder)
        except UserError:
            raise
        except Exception as error:  # a damaged file raises whatever its bytes lead to
            advice = f"delete it, and {self.left} from what is left"
            raise UserError(f"the checkpoint {folder} is damaged ({one_line(error)}): {advice}") from error

    def _contents(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any], State]:
        tensors = load_file(folder / "trained.safetensors")
        if {name: t.shape for name, t in tensors.items()} != {name: p.shape for name, p in self.trained.items()}:
            raise UserError(f"{folder} was made by another plan; {self.anew}, or choose another --out")
        record = parse_json(read_text(folder / "state.json"), str(folder / "state.json"))
        if differing := next(differences(self.settings, record["settings"]), None):
            raise UserError(f"{folder} was made with another {differing}; {self.anew}, or choose another --out")
        best = {} if record["state"]["best"] is None else load_file(folder / "best.safetensors")
        training = torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu")
        known = {name: value for name, value in record["state"].items() if name != "stage"}  # which a pretraining of 0.21 has
        return tensors, best, training, State(**known)


def complete(out: Path) -> list[Path]:
    """The complete checkpoints in a folder that are ours, oldest first. Other programs give theirs such names, too."""
    folder = governing(out)
    steps = {path: match for path in out.glob("checkpoint-*") if (match := CHECKPOINT.fullmatch(path.name))}
    ours = [path for path in steps if folder is not None and folder.made(path)]
    return sorted(ours, key=lambda path: int(steps[path][1]))


def newest(out: Path) -> Path | None:
    """The newest complete checkpoint in a folder, whosever it is, to be read."""
    steps = {path: match for path in out.glob("checkpoint-*") if (match := CHECKPOINT.fullmatch(path.name))}
    return max(steps, key=lambda path: int(steps[path][1]), default=None)


def state_of(out: Path) -> State | None:
    """The state that a tuning in a folder has reached; None where there is no checkpoint, or none that can be read."""
    if (checkpoint := newest(out)) is None:
        return None
    try:
        return State(**parse_json(read_text(checkpoint / "state.json"), str(checkpoint))["state"])
    except (UserError, KeyError, TypeError):
        return None


def put_copy(checkpoint: Path, target: Path) -> None:
    """Copy the files of a checkpoint into a folder of a running job."""
    with building(target) as new:
        with new.filling() as temporary:
            for name in ("trained.safetensors", "best.safetensors", "optimizer.pt", "state.json"):
                if (checkpoint / name).exists():
                    check_plain(checkpoint / name)
                    _write(temporary / name, (checkpoint / name).read_bytes())
        new.replace()


def differences(mine: dict[str, Any], other: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of the settings that differ."""
    for name in dict.fromkeys([*mine, *other]):
        a, b = mine.get(name), other.get(name)
        if a != b:
            inner = [*differences(a, b, f"{prefix}{name}.")] if isinstance(a, dict) and isinstance(b, dict) else []
            yield from inner or [prefix + name]


def _write(path: Path, content: bytes | memoryview) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # otherwise a power cut could keep the name of the file and lose its content
