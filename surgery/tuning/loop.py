"""Brief fine-tuning: one accelerate loop. Cross-entropy at the answers of training examples, KL to the base on text.

Only what has a gradient learns: the grafts that `splice` added, adapters where a recipe asks for them, or what a control leaves
to learn. It learns in float32, also beside a base in half precision. Every step depends on the settings, the seed and its
number alone, so a run that is resumed ends where it would have ended, and several processes (DDP) take the steps that one
takes, but for rounding: each computes its share of the rows, and sums are divided by the counts of the whole batch.
"""

import hashlib
import json
import math
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.modeling.layer_graft import LayerGraftMixer
from surgery.records.recipe import Data, Tune
from surgery.runtime.files import read_text, write_text
from surgery.runtime.processes import is_main, over_gloo
from surgery.runtime.progress import bar, say
from surgery.splicing.splice import adopt
from surgery.tuning.examples import SKILL_ROWS, Batches, ExampleSource
from surgery.tuning.lora import add_adapters, merge_adapters, remove_adapters, save_adapters
from surgery.tuning.losses import Losses, Weights
from surgery.tuning.stopping import EXAMPLES, Watcher

VERSION = 7  # of the steps and checkpoints: a run that another version began cannot be resumed
WEIGHT_DECAY = 0.01  # of matrices and convolution filters
CLIP = 1.0  # the largest norm of the gradient
KEPT_BACK_SEED = 40_009  # added to the run's for examples that are kept back
APART = {"save_steps", "report_to", "gradient_checkpointing", "gradient_accumulation_steps"}  # settings that change no result
STATE, LOG = "state.json", "log.jsonl"
WEIGHTS, BEST, OPTIMIZER = "trained.safetensors", "best.safetensors", "optimizer.safetensors"


@dataclass
class TuningLog:
    """What tuning did. steps: a record of each, {"step", "loss", "examples", "kl", ...}, losses in nats. flat: the step at
    which the held-out loss was flat, where tune.steps is auto. back_to: the step whose weights were put back in the end, since
    the loss rose after it. trained: how many numbers learnt."""

    steps: list[dict[str, float]] = field(default_factory=list)
    flat: int | None = None
    back_to: int | None = None
    trained: int = 0


def tune(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    options: Tune | None = None,
    data: Data | None = None,
    *,
    seed: int = 0,
    folder: Path | None = None,
    name: str = "tuned",
    teacher: Any = None,
) -> TuningLog:
    """Train a hybrid (or a control) in place, and return the log.

    teacher: the base of a control, which cannot switch off what it has learnt; a hybrid is its own teacher. folder: for a
    checkpoint every tune.save_steps steps, and the log. If it holds a checkpoint of the same run, that one is continued.
    name: for people. Adapters (tune.lora) are merged into copies of the weights at the end. Raises UserError for settings or
    data that do not fit, for a checkpoint of another run, and where a loss is not finite.
    """
    options, data = options or Tune(), data or Data()
    batches = Batches(tokenizer, options, data, seed)
    own: list[Any] = getattr(model, "own_mixers", list)()
    if teacher is None and any(isinstance(m, LayerGraftMixer) and not m.replaced for m in own):
        raise UserError("the folder of a hybrid does not hold what a layer graft replaced: give its base as teacher")
    if teacher is None and not hasattr(model, "disable_grafts"):
        raise UserError(f"a {type(model).__name__} is no hybrid; a control needs its base as teacher")
    adapted = add_adapters(model, options.lora, seed) if options.lora else []
    trained = trained_parameters(model)
    if not trained:
        raise UserError("there is nothing to tune: splice the model first, or give it adapters (tune.lora)")
    teacher = None if teacher is None else adopt(teacher)  # whose class reads packed rows
    dtypes = {key: p.dtype for key, p in trained.items()}
    with torch.random.fork_rng(), learning_in_float32(model, trained):
        try:
            run = Run(model, teacher, trained, batches, folder, name)
            try:
                log = run.finish()
            finally:
                run.close()
            for key, p in trained.items():
                if p.isfinite().all() and not p.to(dtypes[key]).isfinite().all():
                    raise UserError(f"after tuning, '{key}' is beyond the range of {dtypes[key]}; use dtype=bfloat16")
        except BaseException:  # the model is as it was, but for what has learnt
            for key, p in trained.items():
                p.data, p.grad = p.data.to(dtypes[key]), None
            if adapted:
                remove_adapters(model, adapted)
            raise
    for key, p in trained.items():
        p.data, p.grad = p.data.to(dtypes[key]), None
    if adapted and options.lora is not None:
        if folder is not None and is_main():
            save_adapters(model, options.lora, adapted, folder / "adapter")
        merge_adapters(model, adapted)
    return log


def trained_parameters(model: Any) -> dict[str, nn.Parameter]:
    """What learns, by name: of a hybrid its grafts and adapters (its base's parameters may have a gradient too, since they are
    shared), of a control whatever has a gradient."""
    learns = {key: p for key, p in model.named_parameters() if p.requires_grad}
    added = {key: p for key, p in learns.items() if ".graft." in key or ".lora_" in key}
    return added if any(".graft." in key for key in added) else learns


@contextmanager
def learning_in_float32(model: Any, trained: dict[str, nn.Parameter]) -> Iterator[None]:
    """While this lasts, what learns is in float32 or wider. Grafts are in training mode, because closed ones need a gradient,
    and so are adapters, for their dropout. Nothing else learns; the base has no dropout, as its teacher has none."""
    own = {id(p) for p in trained.values()}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    for parameter in others:
        parameter.requires_grad_(False)
    for parameter in trained.values():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    model.eval()
    for name, module in model.named_modules():
        if ".graft" in name or ".lora_" in name:
            module.train()
    try:
        yield
    finally:
        model.eval()
        for parameter in others:
            parameter.requires_grad_(True)


class Run:
    """One call of tune, or one process's part in it."""

    def __init__(
        self, model: Any, teacher: Any, trained: dict[str, nn.Parameter], batches: Batches, folder: Path | None, name: str
    ):
        options = batches.options
        self.model, self.trained, self.batches, self.options = model, trained, batches, options
        self.folder, self.name = folder, name
        self.log = TuningLog(trained=sum(p.numel() for p in trained.values()))
        if missing := set(options.report_to) - {each.value for each in get_available_trackers()}:
            raise UserError(f"tune.report_to: {min(missing)} is not installed, or unknown to accelerate")
        self.accelerator = Accelerator(
            cpu=over_gloo(),
            log_with=list(options.report_to) or None,
            project_dir=folder,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # whatever the environment says
        )
        self.processes, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        for size, what in ((options.batch_size, "batch_size"), (options.text_batch_size, "text_batch_size")):
            if size % self.processes:
                raise UserError(f"tune.{what}: {size} rows cannot be divided among {self.processes} processes")
        if batches.skills is not None and self.processes > SKILL_ROWS:
            raise UserError(f"tune.skill_weight: a step has {SKILL_ROWS} such rows, too few for {self.processes} processes")
        self.settings = self._settings()
        if options.report_to:
            self.accelerator.init_trackers(name)
        self.checkpointing = options.gradient_checkpointing and not model.is_activation_checkpointing
        if options.gradient_checkpointing:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
            model.disable_input_require_grads()  # a hook on the embeddings, which the base has, too; reentrant ones need it
            for block in model.base_model.layers:
                block.training = True  # this module alone: what is in it has no dropout
        half = options.mixed_precision == "bf16" or any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
        weights = Weights(
            options.kl_weight, options.skill_weight, options.bigram_weight, options.hints.weight if options.hints else 0.0
        )
        losses = Losses(model, teacher, weights, torch.bfloat16 if half else None)
        self.unhook = losses.close
        # Matrices and filters decay; what has one number for each head does not, and neither does A_log, although it is a
        # matrix in Mamba-1: decay would pull the time scales of the state to 1. Mamba's own code makes the same exceptions.
        decays = {key: p for key, p in trained.items() if p.ndim >= 2 and not key.endswith("A_log")}
        others = [p for key, p in trained.items() if key not in decays]
        groups = [{"params": [*decays.values()], "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))
        # One process computes where the model was loaded; of several each has a device of its own.
        self.device = self.accelerator.device if self.processes > 1 else model.device
        self.losses = self.accelerator.prepare_model(losses, device_placement=self.processes > 1)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        held_out = ExampleSource(batches.tokenizer, options, batches.seed + KEPT_BACK_SEED)
        self.watcher = Watcher(options, lambda: self._measure(held_out), trained)

    def close(self) -> None:
        """Leave nothing in the model but what it has learnt."""
        self.unhook()
        if self.checkpointing:
            self.model.activation_checkpointing_disable()

    def _settings(self) -> dict[str, Any]:
        """What a checkpoint depends on."""
        first = hashlib.sha256()
        for key, p in self.trained.items():
            first.update(key.encode() + p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        settings = {
            "version": VERSION,
            "seed": self.batches.seed,
            "processes": self.processes,
            "tune": self.options.model_dump(mode="json", exclude=APART),
            "data": self.batches.data.model_dump(mode="json", exclude={"train_text", "held_out_text"}),
            "inputs": self.batches.inputs(),
            "first weights": first.hexdigest(),
        }
        return json.loads(json.dumps(settings))

    def finish(self) -> TuningLog:
        """Take the steps that are not yet done, and write a last checkpoint."""
        start = self.resume()
        if start == 0 and self.watcher.is_auto:
            self.watcher.look(0)
        steps = bar(range(start, self.watcher.most), f"tuning {self.name}")
        with stop_requested() as came:
            for step in steps:
                if step >= self.watcher.end:
                    break
                record = {"step": step + 1, **self.take_step(step)}
                record |= self.watcher.look(step + 1)
                self.log.steps.append(record)
                if self.options.report_to:
                    self.accelerator.log({key: value for key, value in record.items() if key != "step"}, step=step + 1)
                stopped = came()
                if self.processes > 1:  # the signal may have come to another one
                    flag = torch.tensor([float(stopped)], device=self.device)
                    stopped = bool(self.accelerator.reduce(flag, "sum").item())
                if stopped or (step + 1) % self.options.save_steps == 0 or step + 1 >= self.watcher.end:
                    self.save(step + 1)
                if stopped:
                    kept = "" if self.folder is None else f"; what was learnt is kept in {self.folder}"
                    say(f"tuning {self.name}: stopped after step {step + 1}{kept}")
                    self.accelerator.wait_for_everyone()  # one that ends takes the others with it
                    raise KeyboardInterrupt
        if self.watcher.is_auto:
            say(f"tuning {self.name}: {len(self.log.steps)} steps, {self.watcher.ending()}")
            self.log.flat, self.log.back_to = self.watcher.flat, self.watcher.back_to
        if self.options.report_to:
            self.accelerator.end_training()
        return self.log

    def take_step(self, step: int) -> dict[str, float]:
        """One step; the losses by name. Raises UserError where a loss or a gradient is not finite."""
        torch.manual_seed(self.batches.seed * 1_000_003 + step)  # of dropout in adapters
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * self.watcher.share(step)
        own = []
        for part in self.batches.step(step):
            counts = tuple(count / self.processes for count in part.counts())
            mine = torch.arange(self.rank, len(part), self.processes)
            pieces = mine.tensor_split(self.options.gradient_accumulation_steps)
            own += [(part.rows(rows).to(self.device), counts) for rows in pieces if len(rows)]
        sums: dict[str, Tensor] = {}
        for number, (part, counts) in enumerate(own):
            last = number == len(own) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.losses):
                loss, terms = self.losses(part, counts)
                self.accelerator.backward(loss)
            for key, value in [*terms.items(), ("loss", loss.detach())]:
                sums[key] = sums.get(key, 0) + value
        norm = self.accelerator.clip_grad_norm_(self.trained.values(), CLIP)
        names = sorted(sums)
        figures = self.accelerator.reduce(torch.stack([*(sums[key].float() for key in names), norm.float()]), "mean")
        *values, size = figures.tolist()  # the only time that a step waits for a GPU
        record = dict(zip(names, values, strict=True))
        broken = next((key for key, value in record.items() if not math.isfinite(value)), None)
        if broken or not math.isfinite(size):
            what = f"the loss '{broken}'" if broken else "the gradient"
            raise UserError(f"{what} of step {step + 1} is not finite; lower tune.learning_rate, or compute in another dtype")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return record

    @torch.no_grad()
    def _measure(self, held_out: ExampleSource) -> np.ndarray:
        """The losses on examples that are kept back, a number a batch."""
        losses = []
        for number in range(-(-EXAMPLES // self.options.batch_size)):
            part = held_out.step(number)
            counts = tuple(count / self.processes for count in part.counts())
            own = part.rows(torch.arange(self.rank, len(part), self.processes)).to(self.device)
            losses.append(self.losses(own, counts)[1]["examples"].float())
        return self.accelerator.reduce(torch.stack(losses), "mean").cpu().double().numpy()

    def save(self, step: int) -> None:
        """Write checkpoint-<step> and remove older ones, in the main process; it has its name only when it is whole."""
        if self.folder is None or not is_main():
            return
        target = self.folder / f"checkpoint-{step}"
        partial = self.folder / f"{target.name}.part"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save_file({key: p.detach().cpu().contiguous() for key, p in self.trained.items()}, partial / WEIGHTS)
            save_file(self.watcher.best_weights, partial / BEST)
            moments = self.optimizer.state_dict()["state"]  # of a parameter, by its number
            tensors = {f"{number}.{name}": tensor for number, state in moments.items() for name, tensor in state.items()}
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial / OPTIMIZER)
            state = {"step": step, "settings": self.settings, "watcher": self.watcher.state()}
            write_text(partial / STATE, json.dumps(state) + "\n")
            write_text(self.folder / LOG, "".join(json.dumps(record) + "\n" for record in self.log.steps))
            shutil.rmtree(target, ignore_errors=True)
            os.replace(partial, target)
            for other in checkpoints(self.folder):
                if other != target:
                    shutil.rmtree(other, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}") from error

    @torch.no_grad()
    def resume(self) -> int:
        """Go on from the newest checkpoint in the folder, if there is one; returns how many steps are done. Raises UserError
        if it belongs to another run."""
        found = checkpoints(self.folder) if self.folder is not None else []
        if not found:
            return 0
        newest = found[-1]
        try:
            state = json.loads(read_text(newest / STATE))
            if other := next(differences(self.settings, state["settings"]), None):
                raise UserError(f"{newest} was made with another {other}; begin anew with --overwrite, or choose another --out")
            weights = load_file(newest / WEIGHTS)
            for key, p in self.trained.items():
                p.copy_(weights[key])
            moments: dict[int, dict[str, Tensor]] = {}
            for key, tensor in load_file(newest / OPTIMIZER).items():
                number, _, name = key.partition(".")
                moments.setdefault(int(number), {})[name] = tensor
            self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})
            self.watcher.restore(state["watcher"])
            self.watcher.best_weights = load_file(newest / BEST)
            lines = read_text(newest.parent / LOG).splitlines()[: state["step"]]
            self.log.steps = [json.loads(line) for line in lines]
        except UserError:
            raise
        except Exception as error:  # a damaged file raises whatever its bytes lead to
            raise UserError(f"the checkpoint {newest} is damaged ({str(error)[:80]}); delete it, or begin anew") from error
        return state["step"]


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def differences(mine: dict[str, Any], other: dict[str, Any], place: str = "") -> Iterator[str]:
    """The dotted names of the settings that differ."""
    for key in dict.fromkeys([*mine, *other]):
        a, b = mine.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differences(a, b, f"{place}{key}.")
        elif a != b:
            yield f"{place}{key}"


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """While this lasts, Ctrl-C and SIGTERM end nothing by themselves: it gives a function that says whether one came."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
