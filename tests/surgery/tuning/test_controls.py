"""Controls: what learns is their own, and what else might have learnt."""

import pytest
import torch

from surgery.errors import UserError
from surgery.kernels.attention import attend
from surgery.modeling.reference import ssd_scan
from surgery.records.plan import Plan, Start
from surgery.records.site import Site
from surgery.splicing.splice import adopt, splice
from surgery.tuning.controls import attend_near, control_plan, narrow, trainable_control
from surgery.tuning.loop import trained_parameters, tune
from tests.surgery.tuning.small import TOKENIZER, few_steps, make_plan, toy_base, toy_hybrid

PLAN = Plan(sites="L1.H1,3", gate=0.5)


@pytest.mark.parametrize("family", ["mamba2", "mamba"])
@pytest.mark.parametrize("name", ["tuned", "initial_state"])
def test_a_control_begins_as_the_base_and_leaves_it_alone(family: str, name: str) -> None:
    base = toy_base(family)
    ids = torch.arange(1, 30)[None]
    said = adopt(base)(input_ids=ids).logits
    control = trainable_control(base, Plan(**make_plan(family)), name)
    assert torch.allclose(control(input_ids=ids).logits, said, atol=1e-10)
    assert not any(p.requires_grad for p in base.parameters())
    log = tune(control, TOKENIZER, few_steps(learning_rate=1e-2), teacher=base)
    assert log.steps[0]["kl"] == pytest.approx(0, abs=1e-10)
    assert log.steps[-1]["kl"] > 1e-6
    assert torch.equal(adopt(base)(input_ids=ids).logits, said)


def test_only_the_layers_of_the_plan_are_tuned() -> None:
    control = trainable_control(toy_base(), PLAN)
    learns = trained_parameters(control)
    assert learns
    assert all(name.startswith("backbone.layers.1.mixer.") for name in learns)
    with pytest.raises(UserError):
        trainable_control(toy_base(), PLAN, "nothing")


def test_an_initial_state_is_the_state_that_a_scan_begins_with() -> None:
    control = trainable_control(toy_base(), PLAN, "initial_state")
    mixer = control.mixer_at(0)
    with torch.no_grad():
        mixer.tap.x0.normal_()
    hidden = torch.randn(2, 11, mixer.hidden_size, dtype=torch.float64)
    streams = mixer.project(hidden)
    y = mixer.scan(streams)
    A = -mixer.A_log.float().exp()
    k0 = mixer.tap.k0.repeat_interleave(mixer.num_heads // mixer.n_groups, 0)
    state = (mixer.tap.x0[:, :, None] * k0[:, None, :]).double().expand(2, -1, -1, -1)
    expected, _ = ssd_scan(streams.x, streams.write, A, streams.k, streams.q, mixer.D, state)
    assert torch.allclose(mixer.tap(mixer, streams, y, None), expected, atol=1e-6)


@pytest.mark.parametrize("name", ["same_layer", "random_site"])
def test_other_heads_are_drawn(name: str) -> None:
    base, plan = toy_base(), Plan(sites="L1.H1,3", starts={"L1.H1": Start(null=3.0)}, gate=0.4)
    drawn = [control_plan(name, base, plan, seed) for seed in range(8)]
    for other in drawn:
        (site,) = other.sites
        assert len(site.heads) == 2
        assert (site.layer == 1) == (name == "same_layer")
        assert name == "random_site" or not {*site.heads} & {1, 3}
        assert other.gate == 0.4
        assert not other.starts
    assert len({other.sites for other in drawn}) > 1
    assert drawn[0] == control_plan(name, base, plan, 0)


def test_controls_that_a_model_cannot_have_are_refused() -> None:
    with pytest.raises(UserError, match="same_layer"):
        control_plan("same_layer", toy_base(), Plan(sites="L1.H0,1,2,3"), 0)
    with pytest.raises(UserError, match="random_site"):
        control_plan("random_site", toy_base(), Plan(sites="L0.H0;L1.H1"), 0)


def test_a_whole_layer_takes_the_place_of_heads() -> None:
    plan = control_plan("whole_layer", toy_base(), PLAN, 0)
    assert (plan.kind, plan.sites) == ("layer", (Site(1),))


@pytest.mark.parametrize("null", [None, torch.tensor([0.3, -1.0], dtype=torch.float64)])
def test_a_window_is_attention_to_the_last_tokens_alone(null: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    q, k, v, bias = (torch.randn(1, 2, 11, *width, dtype=torch.float64) for width in ((4,), (4,), (3,), ()))
    y, m = attend_near(q, k, v, bias, null, None, None, window=4)
    later = attend_near(q[:, :, 9:], k, v, bias, null, None, None, window=4)  # as with a cache
    torch.testing.assert_close(later, (y[:, :, 9:], m[:, :, 9:]))
    for t in range(11):
        near = slice(max(0, t - 3), t + 1)
        alone = attend(q[:, :, t : t + 1], k[:, :, near], v[:, :, near], bias[:, :, near], null)
        torch.testing.assert_close((y[:, :, t : t + 1], m[:, :, t : t + 1]), alone)


def test_a_window_takes_the_bytes_of_the_heads_that_see_everything() -> None:
    hybrid, edited = (splice(toy_base(), plan) for plan in (control_plan("window", toy_base(), PLAN, 0), PLAN))
    ids = torch.arange(1, 30)[None]
    said = hybrid(ids).logits
    assert narrow(hybrid, edited, 3 * ids.shape[1]) == ids.shape[1]  # of two heads of six
    torch.testing.assert_close(hybrid(ids).logits, said)
    assert narrow(hybrid, edited, 12) == 4
    torch.testing.assert_close(hybrid(ids).logits[:, :4], said[:, :4])
    assert not torch.allclose(hybrid(ids).logits[:, 4:], said[:, 4:])


def test_a_hybrid_whose_base_has_a_gradient_tunes_its_grafts_alone() -> None:
    hybrid = toy_hybrid().requires_grad_(True)
    assert set(trained_parameters(hybrid)) == set(hybrid.graft_parameters())
