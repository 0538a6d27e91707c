"""Tuning: only what was asked for changes. Its stages and its resumption have files of their own."""

import copy

import pytest
import torch

from surgery.errors import UserError
from surgery.probes.kv import KVRetrieval
from surgery.probes.scoring import answer
from surgery.records.plan import Plan
from surgery.records.recipe import Data, Lesson, Tune
from surgery.splicing.splice import adopt, graft_parameters, splice
from surgery.tuning import steps
from surgery.tuning.loop import tune
from surgery.tuning.optimizer import cosine_schedule, parameter_groups
from surgery.tuning.trainable import trainable
from tests.models import BASES, VOCABULARY, random_base

LESSON = Lesson(options={"pairs": (2, 4)}, queries=3)
SHORT = Tune(steps=6, batch_size=3, lessons=(LESSON,), text_batch_size=2, text_tokens=24, save_steps=2)


@pytest.fixture
def world_base(tokenizer):
    return random_base(vocab_size=VOCABULARY)


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
    assert all(p.grad is None for p in hybrid.parameters())
    assert {name for name, p in hybrid.named_parameters() if p.requires_grad} == set(graft_parameters(hybrid))
    assert not hybrid.training


def test_the_control_trains_its_layer_alone(world_base, tokenizer):
    control = copy.deepcopy(adopt(world_base))
    start = weights(control)
    tune(control, tokenizer, SHORT, layers=[1], teacher=adopt(world_base))
    for name, p in control.named_parameters():
        assert torch.equal(p, start[name]) == (".layers.1.mixer." not in name), name
    assert all(torch.equal(p, start[name]) for name, p in world_base.named_parameters())


def test_tuning_learns(tiny):
    """The grafts of the built-in model answer other questions better than before."""
    hybrid = splice(tiny.model, Plan.model_validate({"sites": ("L0.H3,5",), "blend": 0.1}))
    questions = KVRetrieval(32).questions(24, seed=1)
    before = answer(hybrid, tiny.tokenizer, questions).loss.mean()
    options = Tune(steps=20, batch_size=4, lessons=(Lesson(options={"pairs": 32}),), text_batch_size=0)
    tune(hybrid, tiny.tokenizer, options, data=Data(skills=()))
    assert answer(hybrid, tiny.tokenizer, questions).loss.mean() < 0.9 * before


def test_same_seed_same_losses_other_seed_other_losses(world_base, tokenizer):
    short = SHORT.model_copy(update={"steps": 2})
    logs = [tune(splice(world_base, Plan(sites=("L1.H3",))), tokenizer, short, seed=seed) for seed in (0, 0, 1)]
    assert logs[0] == logs[1] != logs[2]


def test_without_text_there_is_no_kl(world_base, tokenizer):
    log = tune(
        splice(world_base, Plan(sites=("L1.H3",))), tokenizer, SHORT.model_copy(update={"steps": 2, "text_batch_size": 0})
    )
    assert all(entry["kl"] == 0 for entry in log)


def test_nothing_to_tune_is_refused(world_base, tokenizer):
    with pytest.raises(UserError, match="holds no grafts"):
        tune(adopt(world_base), tokenizer, SHORT)
    with pytest.raises(UserError, match="needs a teacher"):
        tune(adopt(world_base), tokenizer, SHORT, layers=[0])


def test_the_first_step_steps_and_so_does_the_last(world_base, tokenizer, monkeypatch):
    """From the share 1 / warmup on; at no step is the learning rate 0."""
    rates, seeds, step = [], [], steps.TrainingLoop._step

    def noted(self, prepared, *args, **kwargs):
        before = weights(prepared.module)
        seeds.append(torch.initial_seed())
        rates.append(prepared.optimizer.param_groups[0]["lr"])
        losses = step(self, prepared, *args, **kwargs)
        assert any(not torch.equal(p, before[name]) for name, p in weights(prepared.module).items())
        return losses

    monkeypatch.setattr(steps.TrainingLoop, "_step", noted)
    hybrid = splice(world_base, Plan(sites=("L1.H3",)))
    tune(hybrid, tokenizer, SHORT.model_copy(update={"warmup_steps": 4, "learning_rate": 0.4}))
    assert len({*seeds}) == 6  # each drops others at random
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.2])


@pytest.mark.parametrize(("warmup", "steps"), [(0, 5), (3, 3), (10, 4)])
def test_the_schedule_never_rests(warmup, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    schedule, rates = cosine_schedule(optimizer, warmup, steps), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert all(0 < rate <= 2 for rate in rates)
    assert warmup > steps or max(rates) == 2
    assert rates[0] == 2 / max(warmup, 1)


@pytest.mark.parametrize("name", ["plain", "group per two heads, biases", "mamba, biases, untied", "falcon mamba", "llamba"])
def test_matrices_alone_decay(name):
    """Where there is no gradient, a step of AdamW is its weight decay."""
    base = BASES[name]()
    hybrid = splice(base, Plan(sites=("L1.H2,3",), blend=0.5))
    control = trainable(copy.deepcopy(adopt(base)), [1])
    for trained in (trainable(hybrid, None), control, dict(base.named_parameters())):
        before = {parameter: p.detach().clone() for parameter, p in trained.items()}
        for p in trained.values():
            p.requires_grad_().grad = torch.zeros_like(p)
        torch.optim.AdamW(parameter_groups(trained.items(), 0.5), lr=0.1).step()
        for parameter, p in trained.items():
            decays = parameter.endswith("weight") and p.ndim >= 2
            torch.testing.assert_close(p, before[parameter] * (0.95 if decays else 1), rtol=1e-6, atol=0, msg=parameter)
        assert {p.ndim for p in trained.values()} >= {1, 2}


def test_one_group_where_there_is_nothing_for_the_other():
    own = [("a.weight", torch.nn.Parameter(torch.ones(2, 2))), ("gate", torch.nn.Parameter(torch.ones(2)))]
    frozen = ("b.weight", torch.nn.Parameter(torch.ones(2, 2), requires_grad=False))
    assert [group["weight_decay"] for group in parameter_groups([*own, frozen], 0.3)] == [0.3, 0.0]
    assert parameter_groups([own[0], frozen], 0.3) == [{"params": [own[0][1]], "weight_decay": 0.3}]
    assert parameter_groups([own[1], frozen], 0.3) == [{"params": [own[1][1]], "weight_decay": 0.0}]
