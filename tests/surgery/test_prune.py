"""Cuts through a model, against cuts made by hand."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from surgery.errors import UserError
from surgery.locating.subject import Subject
from surgery.models.anatomy import anatomy
from surgery.probes.encoded import padded
from surgery.probes.knowledge import Knowledge
from surgery.probes.scoring import answer, batches
from surgery.records.recipe import Locate
from surgery.records.site import Site
from surgery.splicing.splice import adopt
from surgery.studies import prune
from surgery.studies.prune import Pruner, Pruning
from tests.models import VOCABULARY
from tests.surgery.test_anatomy import build
from tests.surgery.test_replay import untouched


def pruner(name, tokenizer, examples=12):
    model = build(name, vocab_size=VOCABULARY).to(torch.get_default_dtype())
    return Pruner(Subject.of(model, tokenizer), Locate(options={"pairs": 4}, examples=examples), Knowledge())


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_dropping_layers_equals_a_shorter_model(name, tokenizer):
    whole = pruner(name, tokenizer)
    outcome = whole.cut("shorter", dropped=[1, 2])
    shorter = copy.deepcopy(whole.subject.model)
    shorter.model.layers = nn.ModuleList(list(shorter.model.layers)[:1])
    shorter.config.num_hidden_layers = 1
    for probe, questions in whole.questions.items():
        result = answer(shorter, tokenizer, questions)
        measured = getattr(outcome, probe)
        assert measured.accuracy.accuracy == result.correct.mean()
        assert measured.loss.value == pytest.approx(result.loss.mean(), rel=1e-9)
        difference = whole.whole[probe].correct.astype(float) - result.correct
        assert measured.drop.value == pytest.approx(difference.mean())
    assert untouched(whole.subject.model)


@pytest.mark.usefixtures("in_float64")
def test_silent_heads_equal_zeroed_weights(tokenizer):
    whole = pruner("falcon_h1", tokenizer)
    outcome = whole.cut("silent", silent=[Site(0, (1, 5)), Site(1)])
    changed = copy.deepcopy(whole.subject.model)
    found = anatomy(changed)
    with torch.no_grad():
        for layer, head in [(0, 1), (0, 5), *((1, head) for head in range(8))]:
            mixer = found.mixer_of(Site(layer, (head,)))
            mixer.out.weight[:, mixer.columns(head)] = 0
    for probe, questions in whole.questions.items():
        assert getattr(outcome, probe).loss.value == pytest.approx(answer(changed, tokenizer, questions).loss.mean(), rel=1e-9)
    assert len(outcome.silent) == 10


@pytest.mark.usefixtures("in_float64")
@torch.inference_mode()
def test_the_last_row_is_cut_at_the_last_position_alone(tokenizer):
    whole = pruner("bamba", tokenizer)
    outcomes = prune.last_rows(whole)
    assert outcomes.keys() == {"ssm", "attention"}
    model, losses = whole.subject.model, np.zeros(12)
    out = model.model.layers[1].self_attn.o_proj
    for chosen, encoded in batches(tokenizer, whole.questions["retrieval"], 1):  # one by one: the last position is -1
        ids, _ = padded(encoded.rows, model.device)

        def cut(_, args):
            return (torch.cat([args[0][:, :-1], torch.zeros_like(args[0][:, -1:])], 1),)

        rows = [row for row in encoded.rows if len(row) == ids.shape[1]]
        assert len(rows) == len(encoded.rows)
        hook = out.register_forward_pre_hook(cut)
        losses[chosen] = encoded.losses(model(ids).logits[:, -1]).numpy()
        hook.remove()
    assert outcomes["attention"].retrieval.loss.value == pytest.approx(losses.mean(), rel=1e-9)
    assert outcomes["attention"].last_only
    assert outcomes["ssm"].retrieval.loss.value != pytest.approx(losses.mean(), abs=1e-3)
    assert prune.last_rows(pruner("llama", tokenizer, examples=2)) == {}
    assert untouched(model)


def test_a_trained_model_is_pruned_to_its_minimum(tiny, tmp_path):
    model = adopt(tiny.model)
    found = prune.prune(
        Subject.of(model, tiny.tokenizer), Locate(options={"pairs": 8}, examples=32, batch_size=64), Knowledge(), seed=1,
        gather=[Site(0, (0, 1, 2, 3, 4, 5, 6, 7))], aggregate=[Site(1, (3,))],
    )  # fmt: skip
    layers = len(model.backbone.layers)
    assert [len(outcome.dropped) for outcome in found.shortened] == list(range(1, len(found.shortened) + 1))
    *standing, collapsed = found.shortened
    chance, whole = 1 / 8, found.base.retrieval.accuracy.accuracy
    assert all(o.retrieval.accuracy.accuracy >= (whole + chance) / 2 for o in standing)
    assert collapsed.retrieval.accuracy.accuracy < (whole + chance) / 2
    assert found.minimal == layers - len(standing)
    assert [outcome.dropped[0] for outcome in found.left_out] == list(range(found.minimal))
    assert found.kept.keys() == {"both", "gather", "aggregate", "neither"}
    assert len(found.kept["both"].silent) == 7  # of layer 1
    assert len(found.kept["neither"].silent) == 16
    assert found.kept["both"].retrieval.loss.value < found.kept["neither"].retrieval.loss.value
    assert found.last_row == {}
    found.write(tmp_path / "pruning.json")
    assert Pruning.read(tmp_path / "pruning.json") == found
    assert untouched(model)


def test_impossible_cuts_are_refused(tokenizer):
    whole = pruner("llama", tokenizer, examples=3)
    with pytest.raises(UserError, match=r"no site L3: it has layers 0-2"):
        whole.cut("nothing", dropped=[3])
    with pytest.raises(UserError, match=r"L1 is a layer; name its heads"):
        prune.keep_only(whole, [Site(1)], [])
