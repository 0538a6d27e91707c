"""tune.steps: auto ends where the held-out curve is flat, resumed or not, and the controls take as many steps."""

from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from surgery.records.plan import Plan
from surgery.records.recipe import EarlyStopping, Lesson, Tune
from surgery.splicing.splice import splice
from surgery.tuning import plateau
from surgery.tuning.loop import tune
from surgery.tuning.optimizer import cosine_schedule, falling_schedule
from surgery.tuning.plateau import LossCurve, Plateau, taken
from tests.models import VOCABULARY, random_base

SMALL = Tune(
    steps="auto", max_steps=12, batch_size=4, text_batch_size=2, text_tokens=24, warmup_steps=2, save_steps=3,
    lessons=(Lesson(options={"pairs": (2, 4)}, queries=2),),
)  # fmt: skip


@contextmanager
def looking_often():
    """It is looked more often, at less, than in earnest."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"EVAL_STEPS": 2, "EXAMPLES": 8, "PATIENCE": 3, "LEAST_GAIN": 0.5}.items():
            patch.setattr(plateau, name, value)
        yield


@pytest.fixture
def often():
    with looking_often():
        yield


def curve(options: Tune, means: list[float], noise: float = 0.01) -> Plateau:
    """A plateau that has seen these means, one a look, from step 0 on."""
    seen = Plateau(options, LossCurve())
    for look, mean in enumerate(means):
        spread = np.random.default_rng(look).normal(size=8)
        seen.look(look * plateau.EVAL_STEPS, mean + noise * (spread - spread.mean()))
    return seen


def test_the_rate_falls_once_the_curve_is_flat():
    options = Tune(steps="auto", max_steps=400)
    assert curve(options, [3, 2, 1]).span() is None
    assert curve(options, [3, 2, 1, 1.0, 0.5, 0.499]).span() is None  # progress again: one look without it is not flat
    flat = curve(options, [3, 2, 1, 1.0, 0.99])
    assert flat.curve.flat == 100
    assert flat.span() == (100, 133)  # a quarter of the steps
    assert not flat.is_cut_short()
    assert curve(options.model_copy(update={"decay": 0.5}), [3, 2, 1, 1.0, 0.99]).span() == (100, 200)
    assert curve(options, [3, 2, 1, 1.5, 1.2]).span() == (100, 133)  # it goes up
    assert curve(options, [1, 0.9, 0.8], noise=1).span() == (50, 67)  # it goes down, by less than chance does
    down = [0.9**look for look in range(13)]
    assert curve(options, down).span() == (300, 400)  # the most steps there may be
    assert curve(options, down).is_cut_short()


@pytest.mark.usefixtures("often")
def test_it_is_said_whether_the_curve_or_the_limit_ends_the_steps(tokenizer, capsys, monkeypatch):
    for gains, line in ((False, "is flat after 6 steps; the"), (True, "still falls after 9 steps, but tune.max_steps=12; the")):
        monkeypatch.setattr(Plateau, "_progress", lambda *_, gains=gains: gains)
        tune(made(), tokenizer, SMALL, seed=3)
        assert f"the held-out loss {line} learning rate falls for" in capsys.readouterr().err


@given(st.integers(1, 3000), st.lists(st.floats(0.01, 5), min_size=1, max_size=60), st.floats(0.01, 1))
def test_steps_never_exceed_the_most_and_end(most, means, decay):
    options = Tune(steps="auto", max_steps=most, decay=decay)
    plateau, step, looks = Plateau(options, LossCurve()), 0, iter(means)
    plateau.look(0, np.full(4, 6.0))
    while True:
        step += 1
        if plateau.is_due(step):
            plateau.look(step, np.full(4, next(looks, 1.0)))
        span = plateau.span()
        if (span and step >= span[1]) or step >= most:
            break
    assert step <= most
    assert span is not None
    assert 1 <= span[0] <= most


def test_schedules_agree_where_they_mean_the_same():
    def rates(schedule, steps=40):
        result = []
        for _ in range(steps):
            result.append(schedule.get_last_lr()[0])
            schedule.optimizer.step()
            schedule.step()
        return result

    def optimizer():
        return SGD([nn.Parameter(nn.init.zeros_(nn.Linear(1, 1).weight))], lr=1.0)

    late = rates(cosine_schedule(optimizer(), 5, 40, decay=0.25))
    assert late[5:31] == [1.0] * 26
    assert sorted(late[30:], reverse=True) == late[30:]
    assert rates(falling_schedule(optimizer(), 5, lambda: (30, 40))) == late
    assert rates(falling_schedule(optimizer(), 5, lambda: None))[5:] == [1.0] * 35


def made():
    return splice(random_base(vocab_size=VOCABULARY), Plan(sites=("L1.H2",)))


@pytest.fixture(scope="module")
def straight(tokenizer):
    model = made()
    with looking_often():
        return model, tune(model, tokenizer, SMALL, seed=3)


def test_a_run_looks_and_ends(straight):
    _, log = straight
    flat = [record["flat"] for record in log if "flat" in record]
    assert len(flat) == 1
    assert len(log) == max(flat[0] + 1, round(flat[0] / 0.75)) <= 12
    looks = [record["step"] for record in log if "curve" in record]
    assert looks == [*range(2, int(flat[0]) + 1, 2), *[9] * (flat[0] == 9)]


@pytest.mark.usefixtures("often")
def test_an_interrupted_run_ends_as_it_would_have(straight, tokenizer, tmp_path, monkeypatch):
    model, log = straight
    again = made()
    look, looks = Plateau.look, []

    def interrupted(self, step, losses):
        looks.append(step)
        if step == 6:
            raise KeyboardInterrupt
        look(self, step, losses)

    with monkeypatch.context() as patched:
        patched.setattr(Plateau, "look", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tune(again, tokenizer, SMALL, seed=3, out=tmp_path)
    resumed = made()
    assert tune(resumed, tokenizer, SMALL, seed=3, out=tmp_path, resume=True) == log
    for name, parameter in model.named_parameters():
        assert (dict(resumed.named_parameters())[name] == parameter).all(), name


@pytest.mark.usefixtures("often")
def test_another_model_takes_the_same_steps_at_the_same_rates(straight, tokenizer):
    _, log = straight
    options = taken(SMALL, log)
    assert options.steps == len(log)
    flat = next(record["flat"] for record in log if "flat" in record)
    assert round(options.decay * options.steps) == options.steps - flat
    again = made()
    repeated = tune(again, tokenizer, options, seed=3)  # the same model: the same data and rates give the same losses
    assert [record["loss"] for record in repeated] == [record["loss"] for record in log]
    assert taken(Tune(steps=7), log).steps == 7


@pytest.mark.usefixtures("often")
def test_early_stopping_watches_beside_it(tokenizer):
    bounds = EarlyStopping(eval_steps=100, accuracy=1, perplexity=10, examples=4, windows=2)
    log = tune(made(), tokenizer, SMALL.model_copy(update={"early_stopping": bounds}), seed=3)
    assert "held_out" in log[-1]  # the last step is measured, whichever it is
