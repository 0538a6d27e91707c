"""The induction start: a graft that attends to what came behind the same token, before anything is trained."""

import pytest
import torch
from accelerate import cpu_offload
from transformers import LlamaConfig, LlamaForCausalLM

from surgery.errors import UserError
from surgery.jobs.entries import STARTS
from surgery.locating.locate import locate
from surgery.locating.planning import plan, random_plan
from surgery.records.plan import Plan
from surgery.splicing.induction import token_inputs, whitening
from surgery.splicing.splice import splice
from tests.models import BASES, VOCABULARY

SITES = ("L0.H1,3",)


def attention(base, ids, **changes):
    """The mixing matrices (heads, t, t) of the grafts in the first layer."""
    hybrid = splice(base, Plan(sites=SITES, init="induction", time_step=False, **changes)).eval()
    mixer, seen = hybrid.mixer_at(0), []
    handle = mixer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0]), with_kwargs=True
    )
    with torch.no_grad():
        hybrid(input_ids=ids, use_cache=False)
        handle.remove()
        return mixer.matrices(seen[0])[[1, 3]]


@pytest.mark.parametrize("family", [name for name in BASES if "mamba" not in name or name == "llamba"])
def test_it_looks_behind_the_same_token(family):
    base = BASES[family]().eval()
    first = torch.randperm(base.config.vocab_size, generator=torch.Generator().manual_seed(0))[:24]
    matrices = attention(base, torch.cat([first, first])[None])
    asked = torch.arange(24, 47)
    for matrix in matrices:
        assert (matrix[asked].argmax(1) == asked - 24 + 1).all()
        assert matrix[asked, asked - 24 + 1].mean() > 0.5


def test_where_its_place_is_known_it_reads_there():
    base = BASES["plain"]().eval()
    first = torch.randperm(base.config.vocab_size, generator=torch.Generator().manual_seed(1))[:24]
    matrices = attention(base, torch.cat([first, first])[None], places={"L0.H1": 0, "L0.H3": 7})
    asked = torch.arange(25, 46)
    for matrix, behind in zip(matrices, (2, 1), strict=True):  # so far back as for L0.H3 no convolution reaches
        assert (matrix[asked].argmax(1) == asked - 24 + behind).all()


def test_a_ranking_says_how_its_grafts_start(base, tokenizer):
    """Dual and induction are ranked by what each gains. A plan of the ranking, also a random one, starts as it was ranked."""
    asked = {"options": {"pairs": 4}, "examples": 8, "exact": False}
    rankings = {init: locate(base, tokenizer, init=init, **asked) for init in ("dual", "induction")}
    plans = {init: plan(ranking, blend=0.0) for init, ranking in rankings.items()}
    assert {init: chosen.init for init, chosen in plans.items()} == {"dual": "dual", "induction": "induction"}
    assert random_plan(rankings["induction"], plans["induction"], 0).init == "induction"
    assert "init" not in rankings["dual"].model_dump()
    gains = [{str(score.site): score.attribution.value for score in ranking.heads} for ranking in rankings.values()]
    assert gains[0].keys() == gains[1].keys()
    assert gains[0] != gains[1]
    ids = torch.arange(40)[None]
    with torch.no_grad():
        logits = [splice(base, chosen).eval()(input_ids=ids).logits for chosen in plans.values()]
    assert torch.equal(*logits)  # a gate at 0
    assert plans["induction"].init in STARTS


def test_the_start_needs_no_text_and_is_the_same_each_time(base):
    chosen = Plan(sites=SITES, init="induction", blend=0.5)
    one, other = (splice(base, chosen) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    inputs = token_inputs(base, chosen)[0]
    projected = (inputs - inputs.mean(0)) @ whitening(inputs, 8).T
    torch.testing.assert_close(projected.T @ projected / len(inputs), torch.eye(8), atol=1e-3, rtol=0)


def test_directions_that_do_not_exist_are_left_out():
    inputs = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) @ torch.randn(3, 12)
    projection = whitening(inputs, 5)
    assert projection.shape == (5, 12)
    assert (projection[3:] == 0).all()
    assert projection.isfinite().all()


def test_heads_that_share_a_pair_and_read_at_two_places_take_the_usual_one():
    base = BASES["plain"]()
    for places, back in (({"L0.H1": 0, "L0.H3": 0}, 2), ({"L0.H1": 0, "L0.H3": 1}, 1), ({"L0.H1": 1, "L0.H3": 0}, 1)):
        graft = splice(base, Plan(sites=SITES, init="induction", shared=True, places=places)).mixer_at(0).graft
        assert graft.qk_conv.weight[graft.width :, 0].argmax(1).unique().tolist() == [3 - back]


def test_an_offloaded_base_is_read_where_its_weights_are_fetched_to():
    chosen = Plan(sites=SITES, init="induction")
    own = splice(BASES["plain"](), chosen).mixer_at(0).graft.state_dict()
    away = splice(cpu_offload(BASES["plain"](), execution_device="cpu"), chosen).mixer_at(0).graft.state_dict()
    assert all(torch.equal(own[name], away[name]) for name in own)


@pytest.mark.parametrize(("family", "line"), [("mamba", "grafts of mamba have none"), ("llama", "a llama model takes none")])
def test_what_cannot_start_so_is_refused_before_anything_is_measured(tmp_path, tokenizer, family, line):
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY)) if family == "llama" else BASES[family]()
    with pytest.raises(UserError, match=line):
        locate(model, tokenizer, init="induction", kept=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
