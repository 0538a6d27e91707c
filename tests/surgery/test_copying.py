"""The start copy: induction heads with values of their own, which make the token that they find more likely."""

import numpy as np
import pytest
import torch

from surgery.choosing.bounded import Measuring
from surgery.choosing.task import ChoiceTask
from surgery.errors import UserError
from surgery.jobs.entries import entries_of
from surgery.jobs.preparing import check_run
from surgery.loading.opened import Checkpoint
from surgery.locating.locate import locate
from surgery.locating.planning import plan, random_plan
from surgery.locating.subject import Subject
from surgery.probes.kv import KVRetrieval
from surgery.records.plan import Plan
from surgery.records.recipe import Data, PlanOptions, Recipe, Tune
from surgery.splicing.induction import token_inputs, token_outputs
from surgery.splicing.splice import adopt, graft_parameters, splice, unsplice
from surgery.tuning.batches import held_out_windows
from tests.models import BASES, SAME

SITES = ("L0.H1,3", "L2.H0")
FAMILIES = [name for name in BASES if "mamba" not in name or name == "llamba"]


@pytest.fixture(scope="module")
def ranking(base, tokenizer):
    return locate(base, tokenizer, options={"pairs": 4}, examples=8, exact=False)


def copying(base, **changes):
    return splice(base, Plan(**{"sites": SITES, "init": "copy", "blend": 0.3} | changes)).eval()


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("family", FAMILIES)
def test_it_adds_attention_over_its_own_values_to_the_mixer(family, tokens):
    """By its formula, written out: the mixer as it was, plus what is found, times the gate, through its own output."""
    base = BASES[family]().double()
    hybrid, states = copying(base), []
    mixer, alone = hybrid.mixer_at(0), adopt(base).eval().mixer_at(0)
    handle = mixer.register_forward_pre_hook(
        lambda _, args, kwargs: states.append((*args, *kwargs.values())[0]), with_kwargs=True
    )
    hybrid(tokens)
    handle.remove()
    (u,) = states
    graft = mixer.graft
    for row in range(len(u)):
        attention = mixer.matrices(u[row : row + 1])[[1, 3]]  # its attention, for the heads at which it is
        values = (u[row] @ graft.v_proj.weight.T + graft.v_proj.bias).view(u.shape[1], 2, -1)
        found = torch.einsum("hts,shp->thp", attention, values) * graft.gate[:, None]
        expected = alone(u[row : row + 1])[0] + found.flatten(1) @ graft.o_proj.weight.T
        torch.testing.assert_close(mixer(u[row : row + 1])[0], expected, **SAME)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_came_behind_the_same_token_becomes_likelier(family):
    """Of a model that knows nothing, at every place at which a row is repeated."""
    base = BASES[family]().eval()
    first = torch.randperm(base.config.vocab_size, generator=torch.Generator().manual_seed(0))[:24]
    ids = torch.cat([first, first])[None]
    hybrid = copying(base, sites=("L0.H0,1,2,3,4,5,6,7",))
    with torch.no_grad():
        change = hybrid(ids).logits[0] - base(ids).logits[0]
    asked = torch.arange(24, 47)
    least = change[asked, ids[0, asked + 1], None]
    assert (change[asked] > least).float().mean() < 0.25  # by chance half of all tokens are raised more
    if family != "llamba":  # whose MLPs, at random, stand behind it
        assert (change[asked].argmax(-1) == ids[0, asked + 1]).float().mean() > 0.6


def test_a_closed_gate_is_the_base_and_what_it_was_comes_back(tokens):
    base = BASES["plain"]().eval()
    closed = copying(base, blend=0.0)
    with torch.no_grad():
        assert torch.equal(closed(tokens).logits, adopt(base)(tokens).logits)
    restored = unsplice(copying(base)).state_dict()
    assert all(torch.equal(tensor, restored[name]) for name, tensor in base.state_dict().items())
    names = {name.rpartition("graft.")[2] for name in graft_parameters(closed)}
    assert {"v_proj.weight", "v_proj.bias", "o_proj.weight", "gate"} < names


def test_the_output_is_as_long_as_the_stream_and_points_at_the_token():
    base = BASES["plain"]().eval()
    chosen = Plan(sites=SITES, init="copy", blend=0.1)
    outputs, (inputs, _) = token_outputs(base, chosen), token_inputs(base, chosen).values()
    assert outputs.shape == inputs.shape
    lengths = outputs.norm(dim=-1)
    torch.testing.assert_close(lengths, lengths[:1].expand_as(lengths))
    graft = splice(base, chosen).mixer_at(0).graft
    written = (inputs @ graft.v_proj.weight.T + graft.v_proj.bias) @ graft.o_proj.weight.T
    assert torch.nn.functional.cosine_similarity(written, outputs).mean() > 0.5
    best = (written @ torch.nn.functional.normalize(outputs).T).argmax(1)
    assert (best == torch.arange(len(best))).float().mean() > 0.5


def test_a_plan_says_how_it_starts_whatever_was_ranked(ranking):
    chosen = plan(ranking, 2, init="copy", blend=0.1)
    assert (chosen.init, chosen.starts, chosen.time_step) == ("copy", {}, False)
    assert random_plan(ranking, chosen, 0).init == "copy"
    assert plan(ranking, 2).init == "dual"


def test_gates_are_tried_where_heads_are_added(base, tokenizer, ranking):
    """Each as it is, that of 1 too: there is always a gate."""
    auto = {"examples": 8, "windows": 2, "max_heads": 1, "candidates": 1, "gates": (0.1, 1.0), "least_gain": 0.0}
    options = PlanOptions(heads="auto", init="copy", auto=auto)
    questions, text = KVRetrieval(4).questions(4, seed=1), held_out_windows(tokenizer, Data(), Tune(text_tokens=32), 2, 0)
    measuring = Measuring(Subject.of(base, tokenizer), questions, text)
    assert ChoiceTask.of(base, ranking, options, tokenizer=tokenizer).gates == [1.0, 0.1]
    (measured,) = measuring.measure([plan(ranking, sites="L1.H3", init="copy", blend=1.0)], "a plan")
    assert np.isfinite(measured.loss).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"blend": None}, "blend: what a graft copies is added"),
        ({"width": 0}, "width"),
        ({"donor": "gpt2"}, "donor: means nothing"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Plan(**{"sites": ("L0.H1",), "init": "copy", "blend": 0.1} | fields)


def test_what_cannot_be_done_with_it_is_refused_before_anything_is_measured(base, tokenizer):
    hybrid = copying(base)
    with pytest.raises(UserError, match="cannot be located in a hybrid with heads that copy"):
        locate(hybrid, tokenizer, examples=4)
    with pytest.raises(UserError, match="width of at least the state size"):
        copying(base, width=2)
    selective = BASES["mamba"]()
    for init in ("copy", "induction"):
        recipe = Recipe(model="x", plan={"init": init, "blend": 0.1})
        with pytest.raises(UserError, match="grafts of mamba have none"):
            check_run(recipe, Checkpoint("x", selective, tokenizer, "f" * 64))


def test_it_has_no_control_at_other_heads_of_its_layer(base, ranking):
    """There it is the same model."""
    recipe = Recipe(model="x", plan={"init": "copy", "blend": 0.1})

    def names_of(recipe, chosen):
        return [*entries_of(base, recipe, ranking, chosen, None, lambda name, model, *_: model)]

    names = names_of(recipe, plan(ranking, 2, init="copy", blend=0.1))
    assert "control_random_site_tuned" in names
    assert not [name for name in names if "same_layer" in name]
    named = Recipe(model="x", bench={"controls": ["tuned"]})
    assert names_of(named, plan(ranking, 2)) == ["base", "spliced", "tuned", "control_tuned"]
    logits = [copying(base, sites=(site,))(torch.arange(20)[None]).logits for site in ("L0.H1", "L0.H6")]
    assert torch.equal(*logits)
