"""One step or many, one batch or its parts, one process or two, with an interruption or without: the same weights."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from surgery.errors import UserError
from surgery.records.recipe import Data, Examples, Hints
from surgery.splicing.splice import adopt, unsplice
from surgery.tuning.loop import Run, TuningLog, tune
from tests.surgery.tuning.small import TOKENIZER, few_steps, toy_base, toy_hybrid, weights


def tuned(folder: Path | None = None, data: Data | None = None, **options: Any) -> tuple[Any, TuningLog]:
    hybrid = toy_hybrid()
    return hybrid, tune(hybrid, TOKENIZER, few_steps(**options), data, seed=3, folder=folder)


def largest_difference(one: Any, other: Any) -> float:
    b = weights(other)
    return max(float((p - b[name]).abs().max()) for name, p in weights(one).items())


@pytest.mark.parametrize("family", ["mamba2", "mamba"])
def test_grafts_learn_and_the_base_does_not(family: str) -> None:
    hybrid = toy_hybrid(family)
    before, base = weights(hybrid), unsplice(hybrid)
    ids = torch.arange(1, 20)[None]
    said = base(input_ids=ids).logits
    log = tune(hybrid, TOKENIZER, few_steps(), seed=3)
    after = weights(hybrid)
    for name in before:
        assert torch.equal(before[name], after[name]) == (".graft." not in name), name
    assert torch.equal(unsplice(hybrid)(input_ids=ids).logits, said)
    assert [record["step"] for record in log.steps] == [1, 2, 3, 4]
    assert set(log.steps[0]) == {"step", "loss", "examples", "kl"}


def test_the_teacher_is_the_base() -> None:
    hybrid = toy_hybrid(gate=0.0)
    log = tune(hybrid, TOKENIZER, few_steps(steps=1))
    assert log.steps[0]["kl"] == 0.0
    ids = torch.arange(1, 30)[None]
    with hybrid.disable_grafts():
        assert torch.equal(hybrid(input_ids=ids).logits, adopt(toy_base())(input_ids=ids).logits)
    assert not torch.equal(hybrid(input_ids=ids).logits, adopt(toy_base())(input_ids=ids).logits)


def test_memory_is_saved_without_another_result() -> None:
    more = {"bigram_weight": 0.5, "hints": Hints(), "skill_weight": 1.0, "text_tokens": 64, "steps": 2}
    one, log = tuned(**more)
    assert set(log.steps[0]) == {"step", "loss", "examples", "kl", "bigrams", "hints", "skills"}
    for options in ({"gradient_accumulation_steps": 3}, {"gradient_checkpointing": True}):
        other, parts = tuned(**more, **options)
        assert largest_difference(one, other) < 1e-9
        assert parts.steps[-1] == pytest.approx(log.steps[-1], abs=1e-6)


def test_nothing_stays_in_the_model_but_what_it_has_learnt() -> None:
    hybrid, base = toy_hybrid(), toy_base()
    tune(hybrid, TOKENIZER, few_steps(steps=1, gradient_checkpointing=True))
    assert not hybrid.get_input_embeddings()._forward_hooks
    assert not hybrid.is_activation_checkpointing
    with pytest.raises(UserError, match="no hybrid"):
        tune(base, TOKENIZER, few_steps(lora={"target_modules": ["in_proj"]}))
    assert not [name for name, _ in base.named_parameters() if "lora_" in name]


def interrupted(folder: Path, call: int, number: int, **options: Any) -> None:
    """Tune until a signal comes in a forward of the model."""
    hybrid, calls = toy_hybrid(), [0]

    def strike(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), number)

    handle = hybrid.register_forward_pre_hook(strike)
    with pytest.raises(KeyboardInterrupt):
        tune(hybrid, TOKENIZER, few_steps(**options), seed=3, folder=folder)
    handle.remove()


@pytest.mark.parametrize(("number", "call"), [(signal.SIGINT, 1), (signal.SIGTERM, 8)])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, number: int, call: int) -> None:
    options = {"steps": 6, "save_steps": 2}
    whole, log = tuned(**options)
    interrupted(tmp_path, call, number, **options)
    assert 0 < int(next(tmp_path.glob("checkpoint-*")).name.partition("-")[2]) < 6
    again, resumed = tuned(tmp_path, **options)
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(whole).items())
    assert resumed.steps == log.steps
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == log.steps
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]
    finished, _ = tuned(tmp_path, **options)
    assert largest_difference(finished, whole) == 0


def test_a_run_with_steps_auto_is_resumed_alike(tmp_path: Path) -> None:
    options = {"steps": "auto", "max_steps": 12, "save_steps": 4, "batch_size": 16, "text_batch_size": 0}
    whole, log = tuned(**options)
    interrupted(tmp_path, 12, signal.SIGINT, **options)
    again, resumed = tuned(tmp_path, **options)
    assert largest_difference(whole, again) == 0
    assert resumed.flat == log.flat == 9
    assert len(log.steps) == 12


def test_where_the_loss_rises_the_best_weights_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter(range(1, 9))
    monkeypatch.setattr(Run, "_measure", lambda *_: torch.full((4,), next(losses)).numpy())
    for _ in range(2):  # the second time from the last checkpoint, which holds both
        hybrid, log = tuned(tmp_path, steps="auto", max_steps=12)
        assert (len(log.steps), log.back_to) == (12, 0)
        assert largest_difference(hybrid, toy_hybrid()) == 0


def test_what_was_read_is_part_of_the_settings(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five. " * 200)
    data = Data(train_text=(str(text),))
    tuned(tmp_path / "run", data)
    moved = tmp_path / "moved.txt"
    moved.write_text(text.read_text())
    tuned(tmp_path / "run", Data(train_text=(str(moved),)))
    moved.write_text(text.read_text().replace("three", "3"))
    with pytest.raises(UserError, match="text"):
        tuned(tmp_path / "run", Data(train_text=(str(moved),)))
    with pytest.raises(UserError, match=r"tune\.kl_weight"):
        tuned(tmp_path / "run", data, kl_weight=2.0)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    tuned(tmp_path)
    (tmp_path / "checkpoint-4" / "trained.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="checkpoint-4"):
        tuned(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grafts_of_a_base_in_half_precision_learn_in_float32(dtype: torch.dtype) -> None:
    hybrid = toy_hybrid(dtype=dtype)
    before = weights(hybrid)
    log = tune(hybrid, TOKENIZER, few_steps(learning_rate=1e-3), seed=3)
    exact, _ = tuned(learning_rate=1e-3)
    assert {p.dtype for p in hybrid.parameters()} == {dtype}
    assert all(torch.equal(p, before[name]) for name, p in weights(hybrid).items() if ".graft." not in name)
    moved = {name: weights(hybrid)[name].double() - before[name].double() for name in before if ".graft." in name}
    assert any(m.abs().max() > 0 for m in moved.values())
    assert all(torch.isfinite(m).all() for m in moved.values())
    assert abs(log.steps[0]["examples"] - tune(toy_hybrid(), TOKENIZER, few_steps(steps=1), seed=3).steps[0]["examples"]) < 0.2
    assert exact.dtype == torch.float64


def test_what_cannot_be_tuned_is_refused() -> None:
    with pytest.raises(UserError, match="nothing to tune"):
        tune(adopt(toy_base()).requires_grad_(False), TOKENIZER, few_steps())
    with pytest.raises(UserError, match="teacher"):
        tune(toy_base(), TOKENIZER, few_steps())
    hybrid = toy_hybrid()
    with torch.no_grad():
        hybrid.mixer_at(1).graft.log_tau.fill_(torch.nan)
    with pytest.raises(UserError, match="not finite"):
        tune(hybrid, TOKENIZER, few_steps())


def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    options = few_steps(examples=(Examples(options={"pairs": (2, 4)}),), hints=Hints(), text_tokens=48, save_steps=2)
    script = tmp_path / "work.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom safetensors.torch import save_file\n"
        "from surgery.records.recipe import Tune\nfrom surgery.runtime.processes import is_main\n"
        "from surgery.tuning.loop import tune\nfrom tests.surgery.tuning.small import TOKENIZER, toy_hybrid, weights\n"
        "hybrid, out = toy_hybrid(), Path(sys.argv[2])\n"
        "tune(hybrid, TOKENIZER, Tune.model_validate_json(sys.argv[1]), seed=3, folder=out)\n"
        "if is_main():\n    save_file(weights(hybrid), out / 'weights.safetensors')\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29517", str(script)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    subprocess.run([*launch, options.model_dump_json(), str(tmp_path)], env=environment, check=True, timeout=300)
    hybrid = toy_hybrid()
    tune(hybrid, TOKENIZER, options, seed=3)
    both = load_file(tmp_path / "weights.safetensors")
    assert max(float((p - both[name]).abs().max()) for name, p in weights(hybrid).items()) < 1e-9
    assert (tmp_path / "checkpoint-4" / "state.json").exists()
