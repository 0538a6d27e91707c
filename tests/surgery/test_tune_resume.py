"""An interrupted run ends where the uninterrupted one does, whatever interrupts it; what goes wrong is said in one line."""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from surgery.errors import UserError
from surgery.records.plan import Plan
from surgery.records.recipe import Data, EarlyStopping, Lesson, Lora, Tune
from surgery.runtime.ownership.folder import RECORD
from surgery.splicing.splice import graft_parameters, splice
from surgery.tuning import state, steps
from surgery.tuning.distil import Distillation
from surgery.tuning.loop import tune

SHORT = Tune(
    steps=4,
    batch_size=2,
    lessons=(Lesson(options={"pairs": (2, 4)}, queries=3),),
    text_batch_size=1,
    text_tokens=16,
    save_steps=1,
)
KEEP = EarlyStopping(eval_steps=2, accuracy=1.0, perplexity=10.0, examples=4, windows=1)
LONGER = SHORT.model_copy(update={"steps": 12, "save_steps": 2, "early_stopping": KEEP})


@pytest.fixture
def hybrid(base):
    return splice(base, Plan(sites=("L1.H3",), blend=0.5))


def grafts(hybrid):
    return {name: p.detach().clone() for name, p in graft_parameters(hybrid).items()}


def values(hybrid):
    return {name: p.detach().clone() for name, p in hybrid.named_parameters()}


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def dying(after, writing):
    """Replace what a run does, so that it is killed within the `after`-th of these things: half a file, a name given, a folder
    taken apart; and, if not only while it is `writing`, a forward."""
    left = iter(range(after))

    def fatal(owner, name, instead=None):
        own = getattr(owner, name)

        def function(*args, **kwargs):
            if next(left, None) is None:
                if instead is not None:
                    instead(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*args, **kwargs)

        setattr(owner, name, function)

    def half(path, content):
        path.write_bytes(bytes(content)[: len(content) // 2])

    if not writing:
        fatal(Distillation, "forward")
    fatal(state, "_write", half)
    fatal(os, "rename")
    fatal(Path, "unlink")
    fatal(Path, "rmdir")


def checkpoints(folder):
    """What else than its record lies in a folder."""
    return sorted(path.name for path in folder.iterdir() if path.name != RECORD)


def child(hybrid, tokenizer, options, data, folder, result, *when):
    dying(*when)
    log = tune(hybrid, tokenizer, options, data=data, out=folder, resume=True)
    save_file(values(hybrid), result)
    assert len(log) > 10
    os._exit(0)


@pytest.mark.slow  # some 20 processes each; test_interrupted_and_resumed_has_the_same_log interrupts once
@pytest.mark.parametrize("name", ["streamed text", "adapters"])
def test_killed_again_and_again_it_ends_where_the_uninterrupted_run_does(name, base, hybrid, tokenizer, tmp_path):
    options, data = LONGER, Data()
    if name == "streamed text":
        pytest.importorskip("datasets", reason="datasets is not installed")
        lines = [json.dumps({"text": f"the {word} is here " * 9}) + "\n" for word in tokenizer.get_vocab()]
        (tmp_path / "text.jsonl").write_text("".join(lines[:99]))
        data = Data(train_text=({"source": str(tmp_path / "text.jsonl"), "streaming": True}, {"source": "world"}))
    else:
        adapters = Lora(target_modules=("in_proj",), r=2, lora_dropout=0.1)
        options = LONGER.model_copy(update={"lora": adapters, "gradient_accumulation_steps": 2, "gradient_checkpointing": True})
    fork, uninterrupted = multiprocessing.get_context("fork"), splice(base, Plan(sites=("L1.H3",), blend=0.5))
    tune(uninterrupted, tokenizer, options, data=data)
    wanted = values(uninterrupted)
    rng, kills, stages = random.Random(0), 0, set()
    result = tmp_path / "result.safetensors"
    while not result.exists():
        writing = kills % 3 == 1
        when = rng.randint(1, 9) if writing else rng.randint(5, 30), writing
        run = fork.Process(target=child, args=(hybrid, tokenizer, options, data, tmp_path / "run", result, *when))
        run.start()
        run.join(None if writing else rng.choice([0.3, None, None, None]))  # now and then at any moment whatever
        run.kill()
        run.join()
        assert result.exists() or run.exitcode == -signal.SIGKILL
        kills += 1
        assert kills < 100
        stages |= {folder.name for folder in (tmp_path / "run").glob("*")} if (tmp_path / "run").exists() else set()
    assert kills > 5
    assert any(name.startswith(".checkpoint") for name in stages)  # it did die while it wrote
    assert equal(load_file(result), wanted)


def signalled(patch, number, after):
    """A signal comes within the `after`-th forward in training."""
    own, left = Distillation.forward, iter(range(after))

    def forward(*args, **kwargs):
        if next(left, None) is None:
            patch.undo()
            os.kill(os.getpid(), number)
        return own(*args, **kwargs)

    patch.setattr(Distillation, "forward", forward)


@pytest.fixture
def listening():
    """Python's own answer to Ctrl-C: a shell's background job, and what it starts, ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
def test_a_signal_ends_a_step_when_it_is_saved(base, hybrid, tokenizer, tmp_path, monkeypatch, capsys):
    """As soon as the step is whole: nothing of it is lost, and the end is the same."""
    options = SHORT.model_copy(update={"steps": 6, "save_steps": 1000})
    wanted = tune(splice(base, Plan(sites=("L1.H3",), blend=0.5)), tokenizer, options)
    signalled(monkeypatch, signal.SIGINT, after=3)
    with pytest.raises(KeyboardInterrupt):
        tune(hybrid, tokenizer, options, out=tmp_path / "run")
    (kept,) = checkpoints(tmp_path / "run")
    step = int(kept.removeprefix("checkpoint-"))
    assert 0 < step < options.steps
    said = " ".join(capsys.readouterr().err.split())
    assert f"tune: stopped after step {step} of {options.steps}; what was learnt is kept in" in said
    assert tune(hybrid, tokenizer, options, out=tmp_path / "run", resume=True) == wanted


def test_checkpoints_are_also_written_by_time(hybrid, tokenizer, tmp_path, monkeypatch):
    written = []
    save = state.Checkpoints.save
    monkeypatch.setattr(state.Checkpoints, "save", lambda *args: written.append(args[1].step) or save(*args))
    monkeypatch.setattr(steps, "SAVE_SECONDS", 0.0)
    tune(hybrid, tokenizer, SHORT.model_copy(update={"save_steps": 1000}), out=tmp_path / "run")
    assert written == [1, 2, 3, 4]  # the last one is at the end


def test_interrupted_and_resumed_has_the_same_log(base, hybrid, tokenizer, tmp_path, monkeypatch):
    whole = splice(base, Plan(sites=("L1.H3",), blend=0.5))
    log = tune(whole, tokenizer, SHORT)
    failing(monkeypatch, KeyboardInterrupt(), 3)
    with pytest.raises(KeyboardInterrupt):
        tune(hybrid, tokenizer, SHORT, out=tmp_path)
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    assert tune(hybrid, tokenizer, SHORT, out=tmp_path, resume=True) == log
    assert equal(grafts(hybrid), grafts(whole))
    finished = splice(base, Plan(sites=("L1.H3",), blend=0.5))
    assert tune(finished, tokenizer, SHORT, out=tmp_path, resume=True) == log  # nothing is left to do
    assert equal(grafts(finished), grafts(whole))


def failing(patch, problem, at):
    """The `at`-th forward, and no other, raises or returns something else."""
    forward, calls = Distillation.forward, iter(range(1, 100))

    def function(*args, **kwargs):
        losses = forward(*args, **kwargs)
        if next(calls) != at:
            return losses
        if isinstance(problem, BaseException):
            raise problem
        return losses | {"loss": losses["loss"] * problem}

    patch.setattr(Distillation, "forward", function)


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (float("nan"), "the loss is nan at step 3"),
        (torch.OutOfMemoryError("CUDA out of memory"), "does not fit into memory; lower tune.batch_size"),
    ],
)
def test_what_goes_wrong_leaves_the_last_checkpoint(problem, line, hybrid, tokenizer, tmp_path, monkeypatch):
    failing(monkeypatch, problem, 3)
    with pytest.raises(UserError, match=line) as caught:
        tune(hybrid, tokenizer, SHORT, out=tmp_path)
    assert "\n" not in str(caught.value)
    assert checkpoints(tmp_path) == ["checkpoint-2"]


def test_other_errors_are_not_taken_for_lack_of_memory(hybrid, tokenizer, monkeypatch):
    failing(monkeypatch, RuntimeError("something else"), 1)
    with pytest.raises(RuntimeError, match="something else"):
        tune(hybrid, tokenizer, SHORT)


@pytest.mark.parametrize("file", [1, 3])
def test_a_full_disk_leaves_the_last_checkpoint(file, hybrid, tokenizer, tmp_path, monkeypatch):
    write, calls = state._write, iter(range(1, 100))

    def full(path, content):
        if next(calls) == 6 + file:  # three files a checkpoint: in the third one
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    monkeypatch.setattr(state, "_write", full)
    with pytest.raises(UserError, match=r"checkpoint-3: No space left on device; .*checkpoint-2 is intact") as caught:
        tune(hybrid, tokenizer, SHORT, out=tmp_path)
    assert "\n" not in str(caught.value)
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    assert len(tune(hybrid, tokenizer, SHORT, out=tmp_path, resume=True)) == 4


@pytest.mark.parametrize(
    ("plan", "change", "line"),
    [
        (Plan(sites=("L1.H3,4",), blend=0.5), {}, "another plan"),
        (Plan(sites=("L1.H3",), blend=0.5), {"learning_rate": 1.0}, "with another tune.learning_rate;"),
        (Plan(sites=("L1.H3",), blend=0.5), {"text_tokens": 20}, "with another tune.text_tokens;"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(plan, change, line, base, hybrid, tokenizer, tmp_path):
    tune(hybrid, tokenizer, SHORT.model_copy(update={"steps": 1}), out=tmp_path)
    other = splice(base, plan)
    before = grafts(other)
    with pytest.raises(UserError, match=line):
        tune(other, tokenizer, SHORT.model_copy(update={"steps": 1, **change}), out=tmp_path, resume=True)
    assert equal(grafts(other), before)


def test_a_checkpoint_of_0_5_is_refused(hybrid, tokenizer, tmp_path, monkeypatch):
    """Its steps were others."""
    tune(hybrid, tokenizer, SHORT.model_copy(update={"steps": 1}), out=tmp_path)
    written = tmp_path / "checkpoint-1" / "state.json"
    content = json.loads(written.read_text())
    del content["settings"]["version"]
    written.write_text(json.dumps(content))
    with pytest.raises(UserError, match="with another version; begin anew with --overwrite"):
        tune(hybrid, tokenizer, SHORT.model_copy(update={"steps": 1}), out=tmp_path, resume=True)


def test_a_run_that_begins_anew_does_not_meet_the_old_one(hybrid, tokenizer, tmp_path):
    tune(hybrid, tokenizer, SHORT.model_copy(update={"steps": 2}), out=tmp_path)
    tune(hybrid, tokenizer, SHORT.model_copy(update={"steps": 1}), out=tmp_path)
    assert checkpoints(tmp_path) == ["checkpoint-1"]


def test_an_older_checkpoint_that_a_killed_run_could_not_remove_goes_when_it_is_resumed(hybrid, tokenizer, tmp_path):
    """The newest one is read first: where it is damaged, the older one is what there is to go on with."""
    options = SHORT.model_copy(update={"steps": 2})
    tune(hybrid, tokenizer, options, out=tmp_path)
    older, newest = tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"
    shutil.copytree(newest, older)
    damaged = newest / "state.json"
    content = damaged.read_text()
    damaged.write_text(content[:-9])
    with pytest.raises(UserError, match="is not JSON"):
        tune(hybrid, tokenizer, options, out=tmp_path, resume=True)
    assert older.exists()
    damaged.write_text(content)
    tune(hybrid, tokenizer, options, out=tmp_path, resume=True)
    assert checkpoints(tmp_path) == [newest.name]
