"""Ablation by position and exact gains, from the changed layer on, against whole passes of models that are changed by hand."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from surgery.locating.ablation import Unit, ablated, convolutions
from surgery.locating.exact import measure_gains
from surgery.locating.replay import QueryReplay, Replay
from surgery.models.anatomy import anatomy
from surgery.probes.scoring import logits_at_points
from surgery.records.plan import Plan, Start
from surgery.records.site import Site
from surgery.splicing.splice import adopt, splice
from tests.surgery.locating.planted import plant
from tests.surgery.locating.test_attribution import ask_tokens
from tests.surgery.modeling import bases, stock_bases

START = Start(sign=-1, tau=0.5)


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, initializer_range=0.4, **sizes)).double().eval()


def make(family: str):
    """An adopted random model in float64, and questions for it."""
    if family in ("llama", "hybrid"):
        return llama() if family == "llama" else bases.make_hybrid("mamba2"), ask_tokens(bases.make_rows(3, 19), 40)
    module = bases if family in bases.BASES else stock_bases
    return adopt(module.make_base(family)), ask_tokens(module.make_rows(3, 19), module.VOCABULARY)


def zero_by_hook(place, head: int, mask: torch.Tensor):
    """Zero a head's columns of what the output projection reads, for attention; of what the norm reads, for Mamba-2."""
    module = place.out if place.kind == "attention" else place.module.norm

    def hook(_, given):
        columns = given[0].clone()
        columns[..., place.columns(head)] *= ~mask[..., None]
        return (columns, *given[1:])

    return module.register_forward_pre_hook(hook)


@pytest.mark.parametrize("family", ["mamba2", "hybrid", "llama", "bamba", "nemotron_h"])
@pytest.mark.parametrize("where", ["query", "evidence", "spans", "elsewhere", "everywhere"])
def test_ablation_is_what_a_hook_in_the_whole_model_does(family, where):
    model, encoded = make(family)
    places = anatomy(model)
    replay = Replay(model, places.blocks, encoded)
    for place in places.mixers:
        mask = encoded.mask(where)
        with ablated([(Unit(place, (place.first + 1,)), mask)]):
            found, _ = replay.run(place.layer)
        hook = zero_by_hook(place, place.first + 1, mask)
        with torch.no_grad():
            expected = encoded.loss(logits_at_points(model, encoded))
        hook.remove()
        torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", [*bases.BASES, *stock_bases.CONFIGURATIONS, "llama"])
def test_the_query_from_a_cache_is_the_query_of_the_whole(family):
    model, encoded = make(family)
    places = anatomy(model)
    whole, cached = Replay(model, places.blocks, encoded), QueryReplay(model, encoded)
    torch.testing.assert_close(cached.loss, whole.loss, rtol=1e-6, atol=1e-6)
    mask = torch.ones_like(cached.ids[:, cached.begin :], dtype=torch.bool)
    for place in places.mixers:
        unit = Unit(place, (place.first, place.first + place.heads - 1))
        with ablated([(unit, whole.mask("query"))]):
            expected, _ = whole.run(place.layer)
        with ablated([(unit, mask)]):
            torch.testing.assert_close(cached.losses(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cached.losses(), cached.loss, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["mamba2", "mamba", "llamba", "jamba", "qwen3_5_text", "kimi_linear"])
def test_a_convolution_is_ablated_by_its_taps(family):
    model, encoded = make(family)
    replay = Replay(model, anatomy(model).blocks, encoded)
    for unit in convolutions(anatomy(model)):
        with ablated([(unit, replay.mask("everywhere"))]):
            found, _ = replay.run(unit.layer)
        convs = [m for m in unit.place.module.modules() if isinstance(m, torch.nn.Conv1d)]
        own = [conv.weight.detach().clone() for conv in convs]
        with torch.no_grad():
            for conv in convs:
                conv.weight[..., :-1] = 0
            expected = encoded.loss(logits_at_points(model, encoded))
            for conv, weight in zip(convs, own, strict=True):
                conv.weight.copy_(weight)
        torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-6, atol=1e-6)
        assert (found - replay.loss).abs().max() > 1e-3


@pytest.mark.parametrize("family", [*bases.BASES, "bamba", "falcon_h1", "jamba", "olmo_hybrid"])
def test_gains_are_those_of_spliced_models(family):
    model, encoded = make(family)
    units = [(Unit(place, (0, place.heads - 1)), START) for place in anatomy(model).ssms]
    gains = measure_gains(model, encoded, units, batch_size=2)
    for unit, start in units:
        starts = {f"L{unit.layer}.H{head}": start for head in unit.heads}
        hybrid = splice(model, Plan(sites=(Site(unit.layer, unit.heads),), starts=starts)).eval()
        with torch.no_grad():
            saved = encoded.loss(logits_at_points(model, encoded)) - encoded.loss(logits_at_points(hybrid, encoded))
        torch.testing.assert_close(gains[unit.name], saved, check_dtype=False, rtol=1e-6, atol=1e-6)


def test_two_units_of_one_mixer_at_two_places():
    model, encoded = make("mamba2")
    replay, place = Replay(model, anatomy(model).blocks, encoded), anatomy(model).mixers[0]
    with ablated([(Unit(place, (1,)), replay.mask("query")), (Unit(place, (2, 4)), replay.mask("spans"))]):
        found, _ = replay.run(0)
    hooks = [zero_by_hook(place, 1, encoded.mask("query")), *(zero_by_hook(place, h, encoded.mask("spans")) for h in (2, 4))]
    with torch.no_grad():
        expected = encoded.loss(logits_at_points(model, encoded))
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-6, atol=1e-6)


def test_a_model_is_left_as_it_was():
    model, encoded = make("mamba2")
    before = logits_at_points(model, encoded)
    units = [(Unit(place, (0,)), START) for place in anatomy(model).ssms]
    measure_gains(model, encoded, units)
    replay = Replay(model, anatomy(model).blocks, encoded)
    with ablated([(units[0][0], replay.mask("everywhere")), (convolutions(anatomy(model))[1], replay.mask("spans"))]):
        replay.run(0)
    assert torch.equal(logits_at_points(model, encoded), before)
    assert all("forward" not in vars(block) for block in anatomy(model).blocks)


def test_a_convolution_whose_weights_are_elsewhere_is_no_candidate():
    places = anatomy(adopt(plant("head", 0).model))
    for part in places.mixers[0].module.modules():
        if isinstance(part, torch.nn.Conv1d):
            part.weight = torch.nn.Parameter(part.weight.to("meta"))
    assert [unit.layer for unit in convolutions(places)] == [1, 2]
