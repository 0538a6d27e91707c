"""One copy of the weights: what a model has in common with its base is held once, and nobody's tensors change for another."""

import copy
import gc
import weakref

import pytest
import torch

import surgery as package
from surgery.commands import compared as comparing
from surgery.commands import comparison
from surgery.commands.comparison import compare
from surgery.evaluation.bench import measure
from surgery.evaluation.entries import Unheld
from surgery.jobs import entries, opening, run
from surgery.jobs.opening import open_checkpoint
from surgery.loading.digests import model_digest
from surgery.loading.sharing import own_bytes, same_bits
from surgery.models.answers import tensors
from surgery.probes import scoring
from surgery.records.plan import Plan
from surgery.records.recipe import Lesson, Lora, Recipe, Tune
from surgery.splicing.splice import adopt, graft_parameters, splice
from surgery.tuning.loop import tune
from surgery.tuning.trainable import trainable, with_own_mixers
from tests.models import VOCABULARY, random_base

PLANS = {
    "heads": Plan(sites=("L0.H1", "L1.H3,5")),
    "gate": Plan(sites=("L1.H3",), blend=0.5),
    "layer": Plan(kind="layer", sites=("L1",)),
}
SHORT = Tune(steps=3, batch_size=3, lessons=(Lesson(options={"pairs": (2, 4)}, queries=3),), text_batch_size=2, text_tokens=24)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A base, two hybrids of it, their patches, and another model."""
    folder = tmp_path_factory.mktemp("shared")
    vocabulary = VOCABULARY
    base = random_base(vocab_size=vocabulary)
    for name, model in {"base": base, "other": random_base(vocab_size=vocabulary, num_hidden_layers=4)}.items():
        with torch.no_grad():
            model.get_input_embeddings().weight[3] += name == "other"
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, plan in {"heads": PLANS["heads"], "gate": PLANS["gate"]}.items():
        hybrid = splice(base, plan)
        for form in ("hf", "patch"):
            place = {"tokenizer": tokenizer, "plan": plan, "base": str(folder / "base")}
            shards = {"max_shard_size": "200KB"} if (name, form) == ("gate", "hf") else {}
            package.export(hybrid, folder / f"{name}-{form}", format=form, **place, **shards)
    return folder


def copied(model):
    return {name: tensor.clone() for name, tensor in tensors(model).items()}


def same(model, before):
    now = tensors(model)
    return now.keys() == before.keys() and all(same_bits(now[name], before[name]) for name in now)


def grafts(model):
    """The bytes of the grafts of a model."""
    named = (*model.named_parameters(), *model.named_buffers())
    return sum(tensor.nbytes for name, tensor in named if ".graft." in name)


@pytest.mark.parametrize("kind", [None, *PLANS])
def test_a_hybrid_is_its_base_and_its_grafts(base, kind):
    hybrid = adopt(base) if kind is None else splice(base, PLANS[kind])
    assert own_bytes(hybrid, base) == grafts(hybrid)
    assert (grafts(hybrid) > 0) == (kind is not None)


def test_what_a_model_has_of_its_own_is_counted():
    model = random_base()
    assert own_bytes(model) == sum(p.nbytes for p in model.parameters())  # tied weights once
    assert own_bytes(copy.deepcopy(model), model) == own_bytes(model)
    assert own_bytes(model, model) == 0


def test_a_control_is_its_base_and_what_it_trains(base):
    before = copied(base)
    for model in (base, adopt(base)):
        control = with_own_mixers(model, [1, 2])
        trained = trainable(control, [1, 2])
        assert set(trained) == {name for name, _ in control.named_parameters() if ".1.mixer." in name or ".2.mixer." in name}
        assert own_bytes(control, base) == sum(p.nbytes for p in trained.values())
        assert model_digest(control) == model_digest(base)
        with torch.no_grad():
            for p in trained.values():
                p.add_(1)
        assert same(base, before)


@pytest.mark.parametrize(("lora", "dtype"), [(Lora(target_modules=("in_proj",), r=2), torch.float32), (None, torch.bfloat16)])
def test_tuning_a_control_changes_no_other_model(tokenizer, lora, dtype):
    """Neither the base nor the hybrids that share with it, LoRA's targets included, which lie in all layers."""
    base = random_base(vocab_size=VOCABULARY).to(dtype)
    hybrids = [splice(base, plan) for plan in PLANS.values()]
    control = with_own_mixers(base, [1])
    before = [copied(model) for model in (base, *hybrids)]
    learning = [{name: p.requires_grad for name, p in model.named_parameters()} for model in (base, *hybrids)]
    tune(control, tokenizer, SHORT.model_copy(update={"lora": lora}), layers=[1], teacher=adopt(base))
    assert all(same(model, tensors_before) for model, tensors_before in zip((base, *hybrids), before, strict=True))
    assert learning == [{name: p.requires_grad for name, p in model.named_parameters()} for model in (base, *hybrids)]
    changed = {name for name, tensor in tensors(control).items() if not same_bits(tensor, before[0][name])}
    adapted = {name for name in before[0] if lora and name.endswith("in_proj.weight")}
    trained = {name for name in before[0] if ".layers.1.mixer." in name} | adapted
    assert changed == trained or (dtype == torch.bfloat16 and adapted < changed < trained)  # where a step can round to none
    assert own_bytes(control, base) == sum(before[0][name].nbytes for name in trained)


@pytest.mark.parametrize("form", ["hf", "patch"])
def test_opened_beside_its_base_a_hybrid_costs_its_grafts(folder, form, live_bytes):
    base = package.load(folder / "base")
    before, alone = copied(base.model), package.load(folder / f"heads-{form}")
    held = live_bytes()
    hybrid, gated = (package.load(folder / f"{name}-{form}", beside=base) for name in ("heads", "gate"))
    assert live_bytes() - held == grafts(hybrid.model) + grafts(gated.model)
    assert own_bytes(hybrid.model, base.model) == grafts(hybrid.model)
    assert (hybrid.fingerprint, model_digest(hybrid.model)) == (alone.fingerprint, model_digest(alone.model))
    assert hybrid.model.surgery.plan == alone.model.surgery.plan
    ids = torch.arange(40)[None]
    assert torch.equal(hybrid.model(ids).logits, alone.model(ids).logits) or form == "hf"
    assert {n for n, p in hybrid.model.named_parameters() if p.requires_grad} == set(graft_parameters(hybrid.model))
    assert same(base.model, before)


def test_what_differs_is_not_shared(folder):
    """Neither another model's tensors, nor those of another dtype; and minus zero is not zero."""
    base, other = package.load(folder / "base"), package.load(folder / "other")
    beside = package.load(folder / "other", beside=base)
    assert model_digest(beside.model) == model_digest(other.model)
    assert 0 < own_bytes(beside.model, base.model) <= own_bytes(other.model)
    half = package.load(folder / "heads-patch", dtype="bfloat16", beside=base)
    assert own_bytes(half.model, base.model) == own_bytes(half.model)
    assert {p.dtype for p in base.model.parameters()} == {torch.float32}
    assert not same_bits(torch.zeros(3), -torch.zeros(3))
    assert same_bits(torch.full((3,), torch.nan), torch.full((3,), torch.nan))


QUICK = {"suites": ["quick"], "pairs": [3], "limit": 4, "windows": 2, "window": 32, "contexts": [16]}


def total(models):
    """The bytes that models take together."""
    return sum(own_bytes(model, *models[:i]) for i, model in enumerate(models))


def compared(folder, out, *names):
    recipe = Recipe(model=str(folder / "base"), bench=QUICK)
    return compare(recipe, [str(folder / name) for name in names], out)


@pytest.fixture
def measured(monkeypatch, live_bytes):
    """What a comparison measures: [(entries, live bytes)]."""
    seen = []

    def watching(entries, *args, **options):
        seen.append((dict(entries), live_bytes()))
        return measure(entries, *args, **options)

    monkeypatch.setattr(comparison, "measure", watching)
    monkeypatch.setattr(run, "measure", watching)
    return seen


def test_a_comparison_costs_the_base_and_the_grafts(folder, tmp_path, measured, live_bytes):
    """Two patches and an export; and afterwards nothing is left."""
    package.load(folder / "base")  # whatever the first call leaves
    before = live_bytes()
    compared(folder, tmp_path, "heads-patch", "gate-patch", "gate-hf")
    (measured_entries, held), *_ = measured
    models = [entry.model for entry in measured_entries.values()]
    own = [grafts(model) for model in models]
    assert own[0] == 0 < min(own[1:])
    assert total(models) == own_bytes(models[0]) + sum(own)
    assert 0 <= held - before - total(models) < 1024 < min(own[1:])  # constants, and questions that its estimate has asked
    del measured_entries, models
    measured.clear()
    scoring._last = None  # the questions that were asked last
    assert live_bytes() - before < 512  # constants


@pytest.mark.slow
def test_what_does_not_fit_is_opened_for_its_turn(folder, tmp_path, monkeypatch, capsys, measured):
    """With the same result as if all had been held; a hybrid fits, another model does not."""
    names = ("other", "heads-patch", "heads-hf")
    whole = compared(folder, tmp_path / "whole", *names)
    assert all(isinstance(entry.source, torch.nn.Module) for entry in measured[0][0].values())
    assert "opened again" not in capsys.readouterr().err
    heads = package.load(folder / "heads-patch").model
    monkeypatch.setattr(comparing, "available", lambda _: 2 * grafts(heads) / comparing.HELD)
    there = []
    for module in (opening, comparing):
        monkeypatch.setattr(
            module, "open_checkpoint", lambda *a, **k: there.append(k.get("beside")) or open_checkpoint(*a, **k)
        )
    in_turn = compared(folder, tmp_path / "turns", *names)
    assert "timed by themselves: other" in " ".join(capsys.readouterr().err.split())
    assert [name for name, entry in measured[1][0].items() if isinstance(entry.source, Unheld)] == ["other"]
    assert len(there) == 4 + 1  # once more, for its cells and its times
    for name, report in whole.models.items():
        again = in_turn.models[name]
        assert (again.conditions, again.results(), again.change) == (report.conditions, report.results(), report.change)
        assert [cost.context for cost in again.cost] == [16]
    written = len(list((tmp_path / "turns" / "cells").iterdir()))
    there.clear()
    compare(Recipe(model=str(folder / "base"), bench=QUICK | {"limit": 4}), [str(folder / n) for n in names],
            tmp_path / "turns", resume=True)  # fmt: skip
    assert len(there) == 4  # nothing is measured again
    assert len(list((tmp_path / "turns" / "cells").iterdir())) == written


@pytest.mark.slow
def test_a_run_costs_what_it_trains(folder, tmp_path, measured, live_bytes):
    """k controls cost their grafts, or the mixer that one trains, and no model; and afterwards nothing is left."""
    package.load(folder / "base")
    before = live_bytes()
    recipe = Recipe(
        model=str(folder / "base"), bench=QUICK | {"random_sites": 1}, plan={"heads": 1},
        locate={"examples": 2, "options": {"pairs": 3}, "layers": False},
        tune={"steps": 2, "batch_size": 2, "text_batch_size": 2, "text_tokens": 16, "lessons": [{"options": {"pairs": 3}}]},
    )  # fmt: skip
    package.run(recipe, tmp_path / "run")
    (measured_entries, held), *_ = measured
    models = {name: entry.model for name, entry in measured_entries.items()}
    layer = measured_entries["tuned"].plan.sites[0].layer
    mixer = sum(p.nbytes for p in trainable(models["control_tuned"], [layer]).values())
    assert len(models) == 8
    assert total(list(models.values())) == own_bytes(models["base"]) + mixer + sum(map(grafts, models.values()))
    assert 0 <= held - before - total(list(models.values())) < 2**12  # beside them some token ids
    del measured_entries, models
    measured.clear()
    assert live_bytes() - before < 2**12  # what other libraries keep, of a size that no model has


def test_a_tied_model_ties_no_other(folder, tokenizer, tmp_path):
    """Equal head and embeddings that are two tensors stay two: tied, they would count once in the digest, and learn as one."""
    base = package.load(folder / "base")
    untied = random_base(vocab_size=base.model.config.vocab_size, tie_word_embeddings=False)
    with torch.no_grad():
        for tensor in (untied.get_input_embeddings().weight, untied.lm_head.weight):
            tensor.copy_(base.model.get_input_embeddings().weight)
    untied.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    beside = package.load(tmp_path, beside=base).model
    assert model_digest(beside) == model_digest(package.load(tmp_path).model)
    assert beside.lm_head.weight.data_ptr() != beside.get_input_embeddings().weight.data_ptr()
    assert beside.get_input_embeddings().weight.data_ptr() == base.model.get_input_embeddings().weight.data_ptr()


def test_a_donor_is_let_go_before_anything_is_tuned(base, monkeypatch):
    monkeypatch.setattr(entries, "splice", lambda model, plan, donor: splice(model, plan))
    donors, tuned = [random_base()], []
    alive = weakref.ref(donors[0])

    def tune(name, *_):
        gc.collect()
        tuned.append((name, alive()))

    recipe = Recipe(model="base", bench={"controls": False})
    assert [*entries.entries_of(base, recipe, None, PLANS["heads"], donors.pop, tune)] == ["base", "spliced", "tuned"]
    assert tuned == [("tuned", None)]
