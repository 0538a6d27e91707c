"""Brief fine-tuning with accelerate: end to end (distil.py), cross-entropy on retrieval and KL to the frozen base on text.

Only the grafts are trained, and adapters where a recipe asks for them (lora.py), so nothing below the first of them needs
a backward pass. The base's own tensors never change: adapters are merged into copies. The control of every claim runs through
the same loop: the same data and steps, with the base's own layers trained instead.

Everything depends on the settings and the seed alone, so an interrupted run that is resumed ends where it would have ended.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.loading.opened import Checkpoint, a_type, model_of, tokenizer_of
from surgery.records.recipe import Data, Tune
from surgery.runtime.memory import keep_apart
from surgery.runtime.ownership.files import writing
from surgery.runtime.processes import state as processes
from surgery.splicing.remembered import remembered_tokenizer
from surgery.splicing.splice import adopt, stock
from surgery.tuning.lora import adapted
from surgery.tuning.run import TuningRun
from surgery.tuning.state import Checkpoints, Log, State
from surgery.tuning.trackers import check_trackers
from surgery.tuning.trainable import trainable, training
from surgery.world.tokenizer import say_of_the_world

VERSION = 4  # of the steps and of the settings' names: a run that another version began cannot be resumed


def tune(
    model: PreTrainedModel | Checkpoint,
    tokenizer: PreTrainedTokenizerBase | None = None,
    options: Tune | None = None,
    *,
    data: Data | None = None,
    seed: int = 0,
    layers: Iterable[int] | None = None,
    teacher: PreTrainedModel | None = None,
    out: Path | None = None,
    resume: bool = False,
    description: str = "tune",
) -> Log:
    """Train `model` in place and return the log: one record for every step, {"step", "loss", "retrieval", "kl", ...}, losses in
    nats.

    model: a hybrid, whose grafts are trained; or any supported model with `layers`, the numbers of the layers whose mixers are
    trained. The latter is the control, and needs its own copy of the weights. A Checkpoint is taken, too. tokenizer: the one
    that the model brings, unless another is given. teacher: the model that text is compared with. By default the hybrid's base,
    whose weights it shares; give the original base for a reloaded hybrid that has adapters merged into it. options:
    surgery.Tune(steps=100, ...). out: a folder for a checkpoint every `options.save_steps` steps. resume: continue the newest
    checkpoint in `out`. Raises UserError for settings, data or checkpoints that do not fit.
    """
    hybrid = model_of(model, "tune")
    tokenizer = tokenizer_of(model, remembered_tokenizer(hybrid) if tokenizer is None else tokenizer, "tune")
    starting = started_run(
        hybrid, tokenizer, options or Tune(), data=data, seed=seed, layers=layers, teacher=teacher, out=out,
        resume=resume, description=description,
    )  # fmt: skip
    if data is None:
        say_of_the_world(tokenizer, "tune")
    # Every step seeds torch's generator; afterwards the caller goes on with his own numbers.
    devices = [hybrid.device] if hybrid.device.type == "cuda" else []
    with starting as run, torch.random.fork_rng(devices=devices):
        run.finish()
    return run.state.log


@contextmanager
def started_run(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: Tune, *, data: Data | None = None, seed: int = 0,
    layers: Iterable[int] | None = None, teacher: PreTrainedModel | None = None, out: Path | None = None, resume: bool = False,
    description: str = "tune",
) -> Iterator[TuningRun]:  # fmt: skip
    """A run of tune that has taken no step yet, or none since the checkpoint that it resumes. Arguments as for tune."""
    if not isinstance(options, Tune):
        raise UserError(f"surgery.tune takes its options as surgery.Tune(steps=100, ...), not {a_type(options)}")
    data = data or Data()
    check_trackers(options)
    keep_apart(model)
    if layers is None and not getattr(model.config, "grafts", None):
        raise UserError("there is nothing to tune: the model holds no grafts; splice it first: surgery.splice(base, plan)")
    if teacher is None:
        if layers is not None:
            raise UserError("tuning a model's own layers needs a teacher: give the unchanged base")
        teacher = adopt(stock(model))
    layers = None if layers is None else list(layers)
    settings = {
        "version": VERSION,
        "seed": seed,
        "layers": layers,
        "processes": processes().num_processes,
        "tune": options.model_dump(mode="json", exclude={"save_steps", "report_to", "gradient_checkpointing"}),
        "data": data.model_dump(mode="json"),
    }
    adapting = adapted(model, options.lora, seed=seed, out=out if layers is None else None)
    with writing(out), adapting, training(model, trainable(model, layers), teacher) as trained:
        if not trained:
            raise UserError("there is nothing to tune: windows have no weights; adapters would learn beside them (tune.lora)")
        checkpoints = Checkpoints(out, trained, settings)
        state = checkpoints.begin(State(), resume=resume)
        yield TuningRun(model, tokenizer, teacher, trained, options, data, seed, checkpoints, state, description)
