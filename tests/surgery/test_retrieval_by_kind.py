"""Where retrieval lives: named by what is lost of it, and of text."""

from types import SimpleNamespace

import pytest
import torch

import surgery
from surgery.errors import UserError
from surgery.models.anatomy import anatomy
from surgery.records.recipe import Recipe
from surgery.records.site import Site
from surgery.statistics import Estimate
from surgery.studies import make
from surgery.studies.retrieval_by_kind import convolutions, without_convolutions
from surgery.studies.study import Subjects
from tests.models import ROOT


def recipe(model: str, pairs: int = 8) -> Recipe:
    return Recipe.model_validate({
        "model": model, "locate": {"examples": 16, "options": {"pairs": pairs}}, "bench": {"windows": 4, "window": 64}
    })  # fmt: skip


def measured(of: Recipe, out, spoil=lambda model: None, leading: Site | None = None, **options):
    """leading: the head whose ablation costs most."""
    checkpoint = surgery.load(ROOT / "checkpoints" / of.model)
    spoil(checkpoint.model)
    study, subjects = make("retrieval_by_kind", **options), Subjects(of, checkpoint, out)
    score = SimpleNamespace(site=leading, ablation_loss=None if leading is None else Estimate(value=1.0, ci95=(0.9, 1.1), n=9))
    subjects.ranking = SimpleNamespace(heads=[score])
    return study, study.measure(subjects)


def needed_by_all(model) -> None:
    """Without L3.H5 every token's last states are nothing."""
    mixer, dead = anatomy(model).mixer_of(Site(3, (5,))), []

    def look(module, args, output):
        dead[:] = [not args[0][..., mixer.columns(5)].any()]

    mixer.out.register_forward_hook(look)
    model.backbone.norm_f.register_forward_hook(lambda module, args, output: output * 0 if dead == [True] else output)


def test_in_a_hybrid_it_lives_in_attention_and_a_planted_sink_is_no_gatherer(tmp_path, painted):
    study, found = measured(recipe("tiny-hybrid"), tmp_path, needed_by_all, Site(3, (5,)))
    names = {what: part["is"] for what, part in found.about["parts"].items()}
    assert names["all attention heads"] == names["attention of L2"] == "holds retrieval"
    assert names["all SSM heads"] == "needed for text"  # so it says nothing about retrieval
    assert names["all short convolutions"] == "needed for text"
    assert names["L3.H5"] == "a sink"
    assert found.about["bound"] >= found.about["without"] > 0.9  # there is nothing to gain
    assert "all attention heads 1" in found.summary or "all attention heads 9" in found.summary
    study.draw(found, tmp_path / "figure.png", None)


def test_of_a_base_it_says_what_grafts_could_give(tmp_path):
    _, found = measured(recipe("tiny-deltanet", pairs=32), tmp_path, most=1)
    assert len(found.about["at"]) == 1
    assert found.about["bound"] >= found.about["without"] > 0.2
    assert f"A perfect choice at {found.about['at'][0]} would raise retrieval from" in found.summary


def test_without_convolutions_every_token_stands_for_itself():
    model = surgery.load(ROOT / "checkpoints" / "tiny-deltanet").model
    parts = anatomy(model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with without_convolutions(parts):
        assert all(not conv.weight[..., :-1].any() and conv.weight[..., -1].any() for conv in convolutions(parts))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_beginning_as_long_as_a_window_is_refused():
    with pytest.raises(UserError, match="a window of text has 64 tokens"):
        make("retrieval_by_kind", beginning=64).check(recipe("m"))
