"""Tuning: only what was asked for changes. Its stages and its resumption have files of their own."""

import copy

import pytest
import torch

from surgery.errors import UserError
from surgery.plan import Plan
from surgery.recipe import Data, Lesson, Tune
from surgery.splice import adopt, splice
from surgery.splice.splice import graft_parameters
from surgery.tune import tune
from surgery.world.tokenizer import build_tokenizer
from tests.conftest import random_base

LESSON = Lesson(options={"pairs": (2, 4)}, queries=3)
SHORT = Tune(steps=6, batch_size=3, lessons=(LESSON,), text_batch_size=2, text_tokens=24, save_every=2)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def world_base(tokenizer):
    return random_base(vocab_size=-(-len(tokenizer) // 16) * 16)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_only_the_grafts_change_and_all_of_them_do(world_base, tokenizer):
    before = weights(world_base)
    hybrid = splice(world_base, Plan(sites=("L1.H3",), blend=0.5))
    start = weights(hybrid)
    log = tune(hybrid, tokenizer, SHORT)
    assert [entry["step"] for entry in log] == [1, 2, 3, 4, 5, 6]
    assert all(torch.equal(p, before[name]) for name, p in world_base.named_parameters())
    for name in graft_parameters(hybrid):
        assert not torch.equal(hybrid.get_parameter(name), start[name]), name
    assert all(p.requires_grad and p.grad is None for p in hybrid.parameters())
    assert not hybrid.training


def test_the_control_trains_its_layer_alone(world_base, tokenizer):
    control = copy.deepcopy(adopt(world_base))
    start = weights(control)
    tune(control, tokenizer, SHORT, layers=[1], teacher=adopt(world_base))
    for name, p in control.named_parameters():
        assert torch.equal(p, start[name]) == (".layers.1.mixer." not in name), name
    assert all(torch.equal(p, start[name]) for name, p in world_base.named_parameters())


def test_tuning_learns(tiny):
    """The grafts of the built-in model, on the same dictionaries again and again: the loss falls far below its start."""
    hybrid = splice(tiny.model, Plan.model_validate({"sites": ("L0.H3,5",), "blend": 0.1}))
    options = Tune(steps=20, batch_size=2, lessons=(Lesson(options={"pairs": 32}),), text_batch_size=0, repeat=1)
    log = tune(hybrid, tiny.tokenizer, options)
    assert log[-1]["retrieval"] < 0.8 * log[0]["retrieval"], [record["retrieval"] for record in log]


def test_same_seed_same_losses_other_seed_other_losses(world_base, tokenizer):
    logs = [tune(splice(world_base, Plan(sites=("L1.H3",))), tokenizer, SHORT, seed=seed) for seed in (0, 0, 1)]
    assert logs[0] == logs[1] != logs[2]


def test_without_text_there_is_no_kl(world_base, tokenizer):
    log = tune(splice(world_base, Plan(sites=("L1.H3",))), tokenizer, SHORT.model_copy(update={"text_batch_size": 0}))
    assert all(entry["kl"] == 0 for entry in log)


def test_text_from_a_file(world_base, tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text("Some words that nobody generated. " * 30)
    log = tune(splice(world_base, Plan(sites=("L1.H3",))), tokenizer, SHORT, data=Data(train_text=str(tmp_path / "text.txt")))
    assert all(entry["kl"] > 0 for entry in log)


def test_divergence_ends_with_a_clear_line(world_base, tokenizer):
    hybrid = splice(world_base, Plan(sites=("L1.H3",)))
    with torch.no_grad():
        hybrid.backbone.layers[1].mixer.graft.q_proj.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="the loss is nan at step 1"):
        tune(hybrid, tokenizer, SHORT)


def test_nothing_to_tune_is_refused(world_base, tokenizer):
    with pytest.raises(UserError, match="holds no grafts"):
        tune(adopt(world_base), tokenizer, SHORT)
    with pytest.raises(UserError, match="as teacher"):
        tune(adopt(world_base), tokenizer, SHORT, layers=[0])
