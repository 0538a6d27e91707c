"""The comparison of two sides of a proof, on answers made by hand."""

import math

import pytest
import torch

from surgery.exporting.proof import compare_answers, measure_rounding
from tests.surgery.modeling.bases import make_base, make_hybrid, make_rows


def answers(seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(2, 5, 11, generator=generator)
    return {"prompt 6": torch.randn(6, 11, generator=generator), "batch": batch, "tokens": batch.argmax(-1)}


def test_equal_answers_differ_by_nothing():
    assert compare_answers(answers(), answers(), 0.0) == 0


@pytest.mark.parametrize("name", ["prompt 6", "batch"])
@pytest.mark.parametrize("change", [1e-3, math.nan, math.inf])
def test_one_logit_that_differs_is_seen(name, change):
    theirs = answers()
    theirs[name].view(-1)[-1] += change
    found = compare_answers(answers(), theirs, 1e-6)
    assert found == pytest.approx(1e-3, rel=1e-3) if change == 1e-3 else found == math.inf


def test_other_tokens_are_another_model_unless_two_were_tied():
    ours, theirs = answers(), answers()
    theirs["tokens"][0, 1] = (theirs["tokens"][0, 1] + 1) % 11
    assert compare_answers(ours, theirs, 1e-6) == math.inf
    tied = answers()
    best, second = tied["batch"][0, 1].topk(2).indices.tolist()
    tied["batch"][0, 1, second] = tied["batch"][0, 1, best]
    other = {name: value.clone() for name, value in tied.items()}
    other["tokens"][0, 1] = second
    other["batch"][0, 2:] += 1  # after another token everything differs
    assert compare_answers(tied, other, 1e-6) == 0


@pytest.mark.parametrize("name", ["mamba2", "mamba", "llamba"])
def test_what_rounding_explains_covers_float64_and_little_more(name):
    single, double, ids = make_hybrid(name, dtype=torch.float32), make_hybrid(name), make_rows(1)
    with torch.no_grad():
        logits = single(ids, use_cache=False).logits[0]
        apart = (logits.double() - double(ids, use_cache=False).logits[0]).abs().max().item()
    allowed = measure_rounding(single, logits, ids)
    assert apart < allowed < 1e-2
    changed = make_base(name, dtype=torch.float32)
    with torch.no_grad():
        assert (changed(ids, use_cache=False).logits[0] - logits).abs().max() > allowed
