"""Several processes tune as one does, with whole models (DDP) and with divided ones (FSDP2); and what is said of the cost."""

import gc
import multiprocessing.connection
import os
import signal
import socket
import time
from contextlib import nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from itertools import islice

import pytest
import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from surgery.costs import rehearsal
from surgery.costs.rehearsal import rehearse
from surgery.errors import UserError
from surgery.exporting.export import export
from surgery.records.plan import Plan
from surgery.records.recipe import Data, EarlyStopping, Lesson, Lora, Tune
from surgery.runtime.ownership.folder import RECORD
from surgery.runtime.processes import on_main
from surgery.splicing.splice import adopt, graft_parameters, splice, unsplice
from surgery.tuning import state, steps, trackers
from surgery.tuning.batches import loaders
from surgery.tuning.distil import Distillation
from surgery.tuning.loop import tune
from tests.models import VOCABULARY, float64, random_base

DISTIL = Tune(
    steps=3,
    batch_size=4,
    lessons=(Lesson(options={"pairs": (2, 4)}, queries=3),),
    text_batch_size=2,
    text_tokens=16,
    warmup_steps=1,
    gradient_accumulation_steps=2,
    save_steps=1,
)
MORE = DISTIL.model_copy(
    update={
        "steps": 6,
        "early_stopping": EarlyStopping(eval_steps=3, accuracy=1.0, perplexity=10.0, examples=5, windows=3),
        "gradient_checkpointing": True,
        "lora": Lora(target_modules=("in_proj", "1.mixer.out_proj"), r=2),
    }
)
BF16 = DISTIL.model_copy(update={"mixed_precision": "bf16", "gradient_accumulation_steps": 1})
RUNS = {"all": DISTIL, "more": MORE, "bf16": BF16}
PLAN = Plan(sites=("L1.H3",), blend=0.5)
PROCESSES, PATIENCE = 2, 600.0  # seconds, after which processes that wait for each other are ended


@pytest.fixture(scope="module")
def make(tokenizer):
    """Makes the same hybrid every time."""
    return lambda: splice(random_base(vocab_size=VOCABULARY).to(torch.get_default_dtype()), PLAN)


def weights(hybrid):
    """What tuning may change: grafts, and what adapters are merged into."""
    return {name: p.detach().clone() for name, p in hybrid.named_parameters() if ".graft." in name or "proj" in name}


def dying(after):
    """From now on this process is killed within the `after`-th of these: a forward, half a file of a checkpoint."""
    left = iter(range(after))

    def fatal(owner, name, instead=lambda *_: None):
        own = getattr(owner, name)

        def function(*args, **kwargs):
            if next(left, None) is None:
                instead(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*args, **kwargs)

        setattr(owner, name, function)

    fatal(Distillation, "forward")
    fatal(state, "_write", lambda path, content: path.write_bytes(bytes(content)[: len(content) // 2]))


def precisely(name):
    """In float64, but for what is run again in a backward pass, whose thread knows nothing of it."""
    return float64() if name == "all" else nullcontext()


def every_run(make, tokenizer, folder):
    """The logs and weights of all."""
    logs, found = {}, {}
    for name, options in RUNS.items():
        with precisely(name):
            hybrid = in_bf16(make()) if name == "bf16" else make()
            logs[name] = tune(hybrid, tokenizer, options, out=folder / name)
        found[name] = weights(hybrid)
        if name == "all" and folder.name == "with_divided_models":
            on_main(partial(export, hybrid, folder / "hybrid", tokenizer=tokenizer, plan=PLAN, base="base"))
    return {"logs": logs, "weights": found}


def in_bf16(hybrid):
    return hybrid.to(torch.bfloat16)


def with_whole_models(make, tokenizer, folder):
    return every_run(make, tokenizer, folder)


def dividing():
    """Two processes that accelerate has connected, made to divide models though there are no accelerators."""
    AcceleratorState._reset_state()
    wrap = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **wrap}
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # what accelerate looks at; all runs on CPUs


def with_divided_models(make, tokenizer, folder):
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    with pytest.raises(UserError, match="cannot divide models on CPUs"):
        tune(make(), tokenizer, DISTIL)
    dividing()
    held, collect = [], steps.collect

    def noted(learning, trained):
        parts = [p for p in learning.values() if isinstance(p, DTensor)]
        held.append((len(parts) == len(learning), sum(p.to_local().numel() for p in parts)))
        collect(learning, trained)

    steps.collect = noted
    return every_run(make, tokenizer, folder) | {"held": held}


def zero(stage, make, tokenizer, folder):
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)}
    os.environ["DS_ACCELERATOR"] = "cpu"
    found = every_run(make, tokenizer, folder)
    forward, left = Distillation.forward, iter(range(8))  # of 12 in all

    def stopped(*args, **kwargs):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    Distillation.forward = stopped
    with pytest.raises(KeyboardInterrupt):
        resumed(make, tokenizer, folder / "again")
    Distillation.forward = forward
    found["weights"]["resumed"] = weights(resumed(make, tokenizer, folder / "again"))
    return found


def with_zero_2(make, tokenizer, folder):
    return zero(2, make, tokenizer, folder)


def with_zero_3(make, tokenizer, folder):
    return zero(3, make, tokenizer, folder)


def resumed(make, tokenizer, folder):
    """The hybrid of a run that goes on where another one ended."""
    hybrid = make()
    tune(hybrid, tokenizer, MORE, out=folder, resume=True)
    return hybrid


def killed_while_divided(after, who, make, tokenizer, folder):
    dividing()
    if PartialState().process_index == who:
        dying(after)
    return {"weights": weights(resumed(make, tokenizer, folder))}


def process(me, port, task, make, tokenizer, folder):
    places = {"RANK": me, "LOCAL_RANK": me, "WORLD_SIZE": PROCESSES, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()}
    gc.freeze()  # what the parent has is not to be looked through again and again
    AcceleratorState._reset_state(reset_partial_state=True)  # the parent's
    PartialState(cpu=True)
    torch.save(task(make, tokenizer, folder), folder.with_name(f"{folder.name}-{me}.pt"))
    os._exit(0)


def free_port():
    """Of those that no system gives to connections by itself, so that none takes it before the processes do. Test runs beside
    this one begin elsewhere."""
    for port in range(10_000 + os.getpid() * 16 % 20_000, 32_000):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def launch(task, make, tokenizer, folder):
    """Do something in two processes, both of which are ended when one dies, as a launcher does. Their exit codes, sorted."""
    fork = multiprocessing.get_context("fork")
    port = free_port()
    running = [fork.Process(target=process, args=(me, port, task, make, tokenizer, folder)) for me in range(PROCESSES)]
    for one in running:
        one.start()
    end = time.monotonic() + PATIENCE
    while None in (codes := [one.exitcode for one in running]) and not any(codes) and time.monotonic() < end:
        ends = [one.sentinel for one, code in zip(running, codes, strict=True) if code is None]
        multiprocessing.connection.wait(ends, end - time.monotonic())
    for one in running:
        one.kill()
        one.join()
    return sorted(one.exitcode for one in running)


without_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
divided = pytest.mark.slow  # 14 s; whole models in two processes have quick tests
HOW = [
    with_whole_models,
    pytest.param(with_divided_models, marks=divided),
    pytest.param(with_zero_2, marks=without_deepspeed),
    pytest.param(with_zero_3, marks=without_deepspeed),
]


@pytest.fixture(scope="module")
def together(make, tokenizer, tmp_path_factory):
    """Gives what two processes did, which is the same, and the folder where they did it."""
    place, done = tmp_path_factory.mktemp("together"), {}

    def of(how):
        folder = place / how.__name__
        if how not in done:
            assert launch(how, make, tokenizer, folder) == [0] * PROCESSES
            done[how] = [torch.load(place / f"{folder.name}-{me}.pt", weights_only=False) for me in range(PROCESSES)]
        mine, other = done[how]
        assert mine["logs"] == other["logs"]
        for name, tensors in mine["weights"].items():
            close(tensors, other["weights"][name], 0)
        return mine, other, folder

    return of


def close(one, two, tolerance):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=tolerance, atol=tolerance)


def columns(log):
    """step -> figures"""
    return {record["step"]: record for record in log}


def same_curve(one, two, tolerance):
    one, two = columns(one), columns(two)
    assert one.keys() == two.keys()
    for place, figures in one.items():
        assert two[place] == pytest.approx(figures, rel=tolerance, abs=tolerance), place


@pytest.fixture(scope="module")
def alone(make, tokenizer):
    """One process, with the same batches: (log, hybrid) by run."""
    done = {}
    for name, options in RUNS.items():
        with precisely(name):
            hybrid = in_bf16(make()) if name == "bf16" else make()
            done[name] = tune(hybrid, tokenizer, options), hybrid
    return done


@pytest.mark.parametrize("how", HOW)
def test_two_processes_have_the_losses_of_one(how, together, alone):
    two, _, folder = together(how)
    for name, (log, hybrid) in alone.items():
        # bfloat16 rounds to three digits, and does so elsewhere in a half of a batch.
        same_curve(two["logs"][name], log, {"all": 1e-9, "more": 1e-5, "bf16": 1e-2}[name])
        # Adam makes much of rounding where a gradient is next to nothing.
        close(two["weights"][name], weights(hybrid), {"all": 1e-7, "more": 1e-3, "bf16": 1e-2}[name])
    close(two["weights"].get("resumed", two["weights"]["more"]), two["weights"]["more"], 0)
    left = [path.name for path in (folder / "all").iterdir() if path.name != RECORD]
    assert left == [f"checkpoint-{len(two['logs']['all'])}"]


@divided
def test_divided_models_are_divided(together, alone):
    *both, _ = together(with_divided_models)
    assert all(divided for one in both for divided, _ in one["held"])
    whole = sum(p.numel() for p in graft_parameters(alone["all"][1]).values())
    first = [one["held"][0][1] for one in both]
    assert sum(first) == whole
    assert max(first) < 0.7 * whole


@divided
def test_what_divided_models_export_is_what_whole_ones_do(together, alone, tokenizer):
    tokens = torch.randint(1, 99, (2, 37), generator=torch.Generator().manual_seed(1))
    *_, folder = together(with_divided_models)
    exported, hybrid = AutoModelForCausalLM.from_pretrained(folder / "hybrid"), alone["all"][1]
    with float64(), torch.no_grad():
        difference = exported(input_ids=tokens).logits - hybrid(input_ids=tokens).logits
    assert difference.abs().max() < 1e-7
    for name, p in adopt(unsplice(hybrid)).named_parameters():
        assert torch.equal(p, exported.get_parameter(name)), name


@pytest.mark.slow  # three launches; the resumed run of one process has a test of its own in test_tune_resume.py
def test_of_two_processes_one_is_killed_and_they_end_where_the_uninterrupted_ones_do(together, make, tokenizer, tmp_path):
    """In the middle of a step, and in the middle of a checkpoint."""
    folder = tmp_path / "killed"
    for who, after in ((1, 9), (0, 9)):
        codes = launch(partial(killed_while_divided, after, who), make, tokenizer, folder)
        assert codes[0] == -signal.SIGKILL
        assert 0 not in codes
    assert any(folder.glob("checkpoint-*"))
    assert launch(partial(killed_while_divided, 0, None), make, tokenizer, folder) == [0, 0]
    ended = torch.load(tmp_path / "killed-0.pt", weights_only=False)
    close(ended["weights"], together(with_divided_models)[0]["weights"]["more"], 0)


def test_batches_that_cannot_be_divided_are_refused(make, tokenizer, monkeypatch):
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    for change, line in (
        ({"batch_size": 3}, "tune.batch_size: 3 cannot be divided among 2"),
        ({"gradient_accumulation_steps": 3}, "cannot be divided into 3 parts"),
    ):
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
    options = DISTIL.model_copy(update={"report_to": (Remembered.name,)})
    log = tune(make(), tokenizer, options)
    (first, settings), *records, last = Remembered.seen
    assert first == "settings"
    assert settings["batch_size"] == options.batch_size
    assert all(isinstance(value, bool | int | float | str) for value in settings.values())
    assert last == ("finish", None)
    assert [step for step, _ in records] == list(range(1, len(log) + 1))
    assert [values | {"step": step} for step, values in records] == log


def test_a_tracker_that_is_not_there_is_refused(make, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "get_available_trackers", list)
    with pytest.raises(UserError, match="'tensorboard' is not installed"):
        tune(make(), tokenizer, DISTIL.model_copy(update={"report_to": ("tensorboard",)}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def one_size(monkeypatch):
    """A rehearsal tries one size of a step."""
    monkeypatch.setattr(rehearsal, "SECONDS", 0.01)


@pytest.mark.usefixtures("one_size")
def test_a_rehearsal_changes_nothing_and_counts_what_is_trained(make, tokenizer):
    hybrid = make()
    before = {name: p.detach().clone() for name, p in hybrid.named_parameters()}
    found = rehearse(hybrid, tokenizer, DISTIL)
    assert all(torch.equal(p, before[name]) for name, p in hybrid.named_parameters())
    assert dict(found.trained) == {name: tuple(p.shape) for name, p in graft_parameters(hybrid).items()}
    assert found.numbers() == sum(p.numel() for p in graft_parameters(hybrid).values())
    (cost,) = found.costs
    assert (cost.gradients, cost.optimizer) == (4 * found.numbers(), 8 * found.numbers())
    whole = sum(p.nbytes for p in adopt(unsplice(hybrid)).parameters())
    assert cost.weights == pytest.approx(whole + cost.gradients, abs=whole / 100)  # the block is the teacher's, but its graft
    assert cost.seconds > 0
    assert found.steps == DISTIL.steps
    windows = [real for _, real, _ in islice(loaders(tokenizer, DISTIL.model_copy(update={"steps": 16}), Data(), 0, 0)[1], 16)]
    assert found.padding == pytest.approx(1 - sum(real.sum() for real in windows) / sum(real.numel() for real in windows))


@pytest.mark.slow  # two rehearsals
def test_a_rehearsal_sees_that_more_is_held_where_more_is_asked(make, tokenizer):
    small, large = (
        rehearse(make(), tokenizer, DISTIL.model_copy(update={"batch_size": n, "gradient_accumulation_steps": 1}))
        for n in (2, 16)
    )
    assert large.costs[0].activations > 2 * small.costs[0].activations > 0


@pytest.mark.usefixtures("one_size")
def test_a_dry_run_writes_nothing(surgery, make, tokenizer, tmp_path):
    export(make(), tmp_path / "hybrid", tokenizer=tokenizer, plan=PLAN, base="base")
    settings = [part for name in ("batch_size", "text_batch_size") for part in ("--set", f"tune.{name}=2")]
    status, printed, error = surgery("tune", tmp_path / "hybrid", "--out", "tuned", "--dry-run", *settings)
    assert status == 0, error
    assert "backbone.layers.1.mixer.graft.q_proj.weight" in printed
    assert "Nothing was written" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["hybrid"]
