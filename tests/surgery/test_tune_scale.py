"""Several processes tune as one does, with whole models (DDP) and with divided ones (FSDP2); and what is said of the cost."""

import gc
import multiprocessing
import os
import socket
from itertools import islice

import pytest
import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from surgery.doctor.rehearsal import rehearse
from surgery.errors import UserError
from surgery.export import export
from surgery.plan import Plan
from surgery.processes import on_main
from surgery.recipe import Align, Calibrate, Data, Keep, Lesson, Tune
from surgery.splice import adopt, splice, unsplice
from surgery.splice.splice import graft_parameters
from surgery.tune import descent, trackers, tune
from surgery.tune.batches import loaders
from surgery.tune.distil import Distillation
from surgery.world.tokenizer import build_tokenizer
from tests.conftest import random_base

DISTIL = Tune(
    steps=3,
    batch_size=4,
    lessons=(Lesson(options={"pairs": (2, 4)}, queries=3),),
    text_batch_size=2,
    text_tokens=16,
    warmup=1,
    accumulate=2,
    save_every=1,
)
ALL = DISTIL.model_copy(
    update={
        "align": Align(steps=2, batches=2),
        "calibrate": Calibrate(examples=4, tau=(2.0,), gate=(0.5,), evaluations=1),
        "keep": Keep(every=3, knowledge=1.0, perplexity=10.0, examples=5, windows=3),
    }
)
PLAN = Plan(sites=("L1.H3",), blend=0.5)
PROCESSES = 2


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def make(tokenizer):
    """Makes the same hybrid every time."""
    return lambda: splice(random_base(vocab_size=-(-len(tokenizer) // 16) * 16), PLAN)


def grafts(hybrid):
    return {name: p.detach().clone() for name, p in graft_parameters(hybrid).items()}


def interrupted(make, tokenizer, options, folder):
    """The hybrid of a run that was interrupted in its last step, and resumed."""
    forward, calls = Distillation.forward, []

    def stopped(*args, **kwargs):
        calls.append(1)
        if len(calls) == options.accumulate * options.steps:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    Distillation.forward = stopped
    with pytest.raises(KeyboardInterrupt):
        tune(make(), tokenizer, options, out=folder)
    Distillation.forward = forward
    assert [path.name for path in folder.iterdir()] == ["checkpoint-2"]
    resumed = make()
    tune(resumed, tokenizer, options, out=folder, resume=True)
    return resumed


def with_whole_models(make, tokenizer, folder, me):
    hybrid, plain = make(), make()
    log = tune(hybrid, tokenizer, ALL, out=folder / "whole")
    tune(plain, tokenizer, DISTIL)
    resumed = interrupted(make, tokenizer, DISTIL, folder / "whole-again")
    return {"log": log, "all": grafts(hybrid), "plain": grafts(plain), "resumed": grafts(resumed)}


def with_divided_models(make, tokenizer, folder, me):
    AcceleratorState._reset_state()
    wrap = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **wrap}
    with pytest.raises(UserError, match="divides no models on CPUs"):
        tune(make(), tokenizer, DISTIL)
    AcceleratorState._reset_state()
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # what accelerate looks at; all runs on CPUs
    held, collect = [], descent.collect

    def noted(learning, trained):
        parts = [p for p in learning.values() if isinstance(p, DTensor)]
        held.append((len(parts) == len(trained), sum(p.to_local().numel() for p in parts)))
        collect(learning, trained)

    descent.collect = noted
    hybrid = make()
    log = tune(hybrid, tokenizer, DISTIL, out=folder / "divided")
    on_main(lambda: export(hybrid, folder / "hybrid", tokenizer=tokenizer, plan=PLAN, base="base"))
    resumed = interrupted(make, tokenizer, DISTIL, folder / "divided-again")
    with pytest.raises(UserError, match=r"tune\.keep needs whole models"):
        tune(make(), tokenizer, ALL.model_copy(update={"align": None, "calibrate": None}))
    return {"log": log, "held": held, "plain": grafts(hybrid), "resumed": grafts(resumed)}


def process(me, port, make, tokenizer, folder):
    places = {"RANK": me, "LOCAL_RANK": me, "WORLD_SIZE": PROCESSES, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()}
    gc.freeze()  # what the parent has is not to be looked through again and again
    AcceleratorState._reset_state(reset_partial_state=True)  # the parent's
    PartialState(cpu=True)
    for how in (with_whole_models, with_divided_models):
        torch.save(how(make, tokenizer, folder, me), folder / f"{how.__name__}-{me}.pt")
    os._exit(0)


@pytest.fixture(scope="module")
def together(make, tokenizer, tmp_path_factory):
    """The folder where two processes left what they did."""
    folder, fork = tmp_path_factory.mktemp("together"), multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = [fork.Process(target=process, args=(me, port, make, tokenizer, folder)) for me in range(PROCESSES)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    assert [one.exitcode for one in running] == [0] * PROCESSES
    return folder


def close(one, two, tolerance):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=tolerance, atol=tolerance)


def found(folder, how):
    """What both processes did, which is the same."""
    mine, other = (torch.load(folder / f"{how.__name__}-{me}.pt", weights_only=False) for me in range(PROCESSES))
    assert mine["log"] == other["log"]
    for name in ("plain", "resumed"):
        close(mine[name], other[name], 0)
    return mine


def columns(log):
    """stage, step -> figures"""
    return {(r["stage"], r["step"]): {k: v for k, v in r.items() if k not in ("stage", "step")} for r in log}


def same_curve(one, two):
    one, two = columns(one), columns(two)
    assert one.keys() == two.keys()
    for place, figures in one.items():
        assert two[place] == pytest.approx(figures, rel=1e-5, abs=1e-5), place


@pytest.fixture(scope="module")
def alone(make, tokenizer):
    """One process, with the same batches."""
    hybrid, every = make(), make()
    return {"log": tune(hybrid, tokenizer, DISTIL), "plain": hybrid, "all": tune(every, tokenizer, ALL), "tuned": every}


def test_two_processes_have_the_losses_of_one(together, alone):
    two = found(together, with_whole_models)
    same_curve(two["log"], alone["all"])
    assert {record["stage"] for record in two["log"]} == {"align", "calibrate", "distil"}
    assert sum("knowledge" in record for record in two["log"]) == 1
    close(two["all"], grafts(alone["tuned"]), 1e-3)  # Adam makes much of rounding where a gradient is next to nothing
    assert [path.name for path in (together / "whole").iterdir()] == [f"checkpoint-{len(two['log'])}"]


def test_divided_models_have_the_losses_of_whole_ones(together, alone):
    two = found(together, with_divided_models)
    same_curve(two["log"], alone["log"])
    whole = sum(p.numel() for p in graft_parameters(alone["plain"]).values())
    held = [torch.load(together / f"with_divided_models-{me}.pt", weights_only=False)["held"][0] for me in range(PROCESSES)]
    assert all(divided for divided, _ in held)
    assert sum(numbers for _, numbers in held) == whole
    assert max(numbers for _, numbers in held) < 0.7 * whole


def test_what_divided_models_export_is_what_whole_ones_do(together, alone, tokenizer):
    tokens = torch.randint(1, 99, (2, 37), generator=torch.Generator().manual_seed(1))
    exported = AutoModelForCausalLM.from_pretrained(together / "hybrid")
    with torch.no_grad():
        difference = exported(input_ids=tokens).logits - alone["plain"](input_ids=tokens).logits
    assert difference.abs().max() < 1e-4
    for name, p in adopt(unsplice(alone["plain"])).named_parameters():
        assert torch.equal(p, exported.get_parameter(name)), name


@pytest.mark.parametrize("how", [with_whole_models, with_divided_models])
def test_two_processes_resumed_end_where_the_uninterrupted_ones_do(how, together):
    two = found(together, how)
    close(two["resumed"], two["plain"], 0)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"batch_size": 3}, "tune.batch_size: 3 cannot be divided among 2"),
        ({"text_batch_size": 1}, "tune.text_batch_size: 1 cannot"),
        ({"accumulate": 3}, "have no 3 parts"),
    ],
)
def test_batches_that_cannot_be_divided_are_refused(change, line, make, tokenizer, monkeypatch):
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(UserError, match=line):
        tune(make(), tokenizer, DISTIL.model_copy(update=change))


class Remembered(GeneralTracker):
    """Keeps what it is told."""

    name, requires_logging_directory, seen = "remembered", False, []

    def __init__(self, run_name, **kwargs):
        super().__init__()
        self.run_name = run_name

    @property
    def tracker(self):
        return self.seen

    def store_init_configuration(self, values):
        self.seen.append(("settings", values))

    def log(self, values, step=None, **kwargs):
        self.seen.append((step, values))

    def finish(self):
        self.seen.append(("finish", None))


def test_trackers_get_every_record_of_the_log(make, tokenizer, monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, Remembered.name, Remembered)
    monkeypatch.setattr(Remembered, "seen", [])
    options = ALL.model_copy(update={"trackers": (Remembered.name,), "keep": None})
    log = tune(make(), tokenizer, options)
    (first, settings), *records, last = Remembered.seen
    assert first == "settings"
    assert settings["batch_size"] == options.batch_size
    assert all(isinstance(value, bool | int | float | str) for value in settings.values())
    assert last == ("finish", None)
    assert [step for step, _ in records] == list(range(1, len(log) + 1))
    wanted = [{f"{stage}/{name}": value for name, value in figures.items()} for (stage, _), figures in columns(log).items()]
    assert [values for _, values in records] == wanted


@pytest.mark.parametrize(
    ("tracker", "line"), [("tensorboard", "'tensorboard' is not installed"), ("paper", "there is no 'paper'")]
)
def test_a_tracker_that_is_not_there_is_refused(tracker, line, make, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "get_available_trackers", list)
    with pytest.raises(UserError, match=line):
        tune(make(), tokenizer, DISTIL.model_copy(update={"trackers": (tracker,)}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_rehearsal_changes_nothing_and_counts_what_is_trained(make, tokenizer):
    hybrid = make()
    before = {name: p.detach().clone() for name, p in hybrid.named_parameters()}
    found = rehearse(hybrid, tokenizer, ALL)
    assert all(torch.equal(p, before[name]) for name, p in hybrid.named_parameters())
    assert dict(found.trained) == {name: tuple(p.shape) for name, p in graft_parameters(hybrid).items()}
    assert found.numbers() == sum(p.numel() for p in graft_parameters(hybrid).values())
    (cost,) = found.costs
    assert (cost.gradients, cost.optimizer) == (4 * found.numbers(), 8 * found.numbers())
    whole = sum(p.nbytes for p in adopt(unsplice(hybrid)).parameters())
    assert cost.weights == pytest.approx(whole + cost.gradients, abs=whole / 100)  # the block is the teacher's, but its graft
    assert cost.seconds > 0
    assert found.steps == ALL.steps
    windows = [real for _, real in islice(loaders(tokenizer, ALL.model_copy(update={"steps": 16}), Data(), 0, 0)[1], 16)]
    assert found.padding == pytest.approx(1 - sum(real.sum() for real in windows) / sum(real.numel() for real in windows))


def test_a_rehearsal_sees_that_more_is_held_where_more_is_asked(make, tokenizer):
    small, large = (rehearse(make(), tokenizer, DISTIL.model_copy(update={"batch_size": n, "accumulate": 1})) for n in (2, 16))
    assert large.costs[0].activations > 2 * small.costs[0].activations > 0


def test_a_dry_run_writes_nothing(surgery, make, tokenizer, tmp_path):
    export(make(), tmp_path / "hybrid", tokenizer=tokenizer, plan=PLAN, base="base")
    settings = [part for name in ("batch_size", "text_batch_size") for part in ("--set", f"tune.{name}=2")]
    status, printed, error = surgery("tune", tmp_path / "hybrid", "--out", "tuned", "--dry-run", *settings)
    assert status == 0, error
    assert "backbone.layers.1.mixer.graft.q_proj.weight" in printed
    assert "Nothing was written" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["hybrid"]
