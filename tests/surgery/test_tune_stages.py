"""The losses of tuning, that saving work changes no figure, and early stopping."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import MambaConfig, MambaForCausalLM

from surgery.records.plan import Plan
from surgery.records.recipe import Data, EarlyStopping, Lesson, Tune
from surgery.splicing.splice import adopt, graft_parameters, splice, unsplice
from surgery.tuning.batches import loaders
from surgery.tuning.distil import Distillation
from surgery.tuning.early_stopping import Guard
from surgery.tuning.loop import tune
from surgery.tuning.micro_batches import MicroBatches
from surgery.tuning.sequences import IGNORE
from surgery.tuning.shared_parts import StateCache
from surgery.tuning.trainable import trainable, training
from tests.models import SAME, VOCABULARY, random_base, random_llamba, random_selective

LESSON = Lesson(options={"pairs": (2, 4)}, queries=3)
SHORT = Tune(steps=2, batch_size=4, lessons=(LESSON,), text_batch_size=2, text_tokens=16, warmup_steps=1)


@pytest.fixture(scope="module")
def vocabulary():
    return VOCABULARY


EQUAL = {"rtol": 0, "atol": 0}
HEADS, LAYER = Plan(sites=("L1.H2,3",), blend=0.3), Plan(kind="layer", sites=("L1",))
KINDS = {
    "mamba-2": (random_base, HEADS),
    "mamba-2, layer": (random_base, LAYER),
    "mamba-1": (lambda **fields: random_selective(MambaConfig, MambaForCausalLM, **fields), HEADS),
    "llamba, layer": (random_llamba, LAYER),
}


@pytest.fixture(params=KINDS)
def spliced(request, vocabulary):
    """(base, hybrid)"""
    make, plan = KINDS[request.param]
    base = make(vocab_size=vocabulary).to(torch.get_default_dtype())
    return base, splice(base, plan)


one_of_each_graft = pytest.mark.parametrize("spliced", ["mamba-2", "llamba, layer"], indirect=True)


@pytest.fixture
def hybrid(vocabulary):
    return splice(random_base(vocab_size=vocabulary).to(torch.get_default_dtype()), HEADS)


def one_batch(tokenizer, options=SHORT):
    (lesson,), (text,) = loaders(tokenizer, options.model_copy(update={"steps": 1}), Data(), 0, 0)
    return lesson, text


def reference(student, teacher, lesson, text):
    """The losses with nothing shared and nothing left out: two whole models, all logits."""
    (ids, targets), (windows, real, _) = lesson, text
    logits = student(input_ids=ids, use_cache=False).logits
    ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    with torch.no_grad():
        wanted = teacher(input_ids=windows, use_cache=False).logits.log_softmax(-1)
    given = student(input_ids=windows, use_cache=False).logits.log_softmax(-1)
    kl = F.kl_div(given, wanted, log_target=True, reduction="none").sum(-1)
    return {"retrieval": ce, "kl": (kl * real).sum() / real.sum()}


def gradients(loss, trained):
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


def perturbed(hybrid):
    """With grafts that are not where they started."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in graft_parameters(hybrid).values():
            p.add_(0.3 * torch.randn(p.shape, generator=noise))
    return hybrid


@pytest.mark.usefixtures("in_float64")
def test_the_losses_are_those_of_two_whole_models(spliced, tokenizer):
    base, hybrid = spliced
    lesson, text = one_batch(tokenizer)
    text[1][0, 9:] = False  # as where documents have other lengths
    with training(perturbed(hybrid), trainable(hybrid, None)) as trained:
        module = Distillation(hybrid, adopt(base), kl_weight=2.0)
        assert module.first == 1
        assert module.teacher is None
        found, wanted = module(*lesson, text), reference(hybrid, adopt(base), lesson, text)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, **SAME)
        ours, theirs = gradients(found["loss"], trained), gradients(wanted["retrieval"] + 2 * wanted["kl"], trained)
        torch.testing.assert_close(ours, theirs, **SAME)
    assert found["kl"] > 1e-6


@pytest.mark.usefixtures("in_float64")
def test_the_losses_of_a_control_and_of_another_teacher(vocabulary, tokenizer):
    base, lesson, text = random_base(vocab_size=vocabulary).double(), *one_batch(tokenizer)
    control, other = copy.deepcopy(adopt(base)), copy.deepcopy(adopt(base))
    with torch.no_grad():
        control.backbone.layers[2].mixer.in_proj.weight += 0.05
        other.backbone.embeddings.weight += 0.05
    for teacher, whole in ((adopt(base), False), (other, True)):
        with training(control, trainable(control, [2])):
            module = Distillation(control, teacher)
            assert (module.first, module.teacher is not None) == (2, whole)
            found, wanted = module(*lesson, text), reference(control, teacher, lesson, text)
            torch.testing.assert_close({name: found[name] for name in wanted}, wanted, **SAME)


def test_what_coincides_is_run_once_and_what_comes_again_not_at_all(hybrid, tokenizer):
    lesson, text = one_batch(tokenizer)
    teacher = adopt(unsplice(hybrid))
    with training(hybrid, trainable(hybrid, None)):
        module = Distillation(hybrid, teacher)
        below, above, others = hybrid.backbone.layers[0], hybrid.backbone.layers[2], module.teacher_blocks[0]
        outputs = {below: [], above: [], others: []}

        def note(block, _, output):
            outputs[block].append(output)

        for block in outputs:
            block.register_forward_hook(note)
        first = module(*lesson, text, key=0)
        assert [len(found) for found in outputs.values()] == [2, 3, 1]  # above: student twice, teacher once
        assert not any(output.requires_grad for output in outputs[below] + outputs[others])
        again = module(*lesson, text, key=0)
        assert [len(found) for found in outputs.values()] == [2, 5, 1]
        assert again == first
        small = Distillation(hybrid, teacher)
        small.cache = StateCache(100)
        assert small(*lesson, text, key=0) == small(*lesson, text, key=0) == first
        assert not small.cache.tensors


def test_no_more_is_kept_than_was_allowed():
    kept, made = StateCache(100), []
    sizes = {"a": 20, "b": 10, "c": 5, None: 1}

    def make(key):
        made.append(key)
        return torch.zeros(sizes[key])

    for key in ("a", "b", "a", "b", "c", "c", None, None):
        kept.get((key, "x"), partial(make, key))
    assert made == ["a", "b", "b", "c", None, None]
    assert kept.bytes == 100


@pytest.mark.parametrize(
    ("change", "tolerance"), [({"gradient_accumulation_steps": 3}, SAME), ({"gradient_checkpointing": True}, EQUAL)]
)
def test_a_switch_changes_neither_losses_nor_weights(change, tolerance, vocabulary, tokenizer, request):
    if tolerance is SAME:
        request.getfixturevalue("in_float64")
    hybrid = request.getfixturevalue("hybrid")
    other = copy.deepcopy(hybrid)
    plain, switched = tune(hybrid, tokenizer, SHORT), tune(other, tokenizer, SHORT.model_copy(update=change))
    for name in ("retrieval", "kl"):
        one, two = (torch.tensor([record[name] for record in log]) for log in (plain, switched))
        torch.testing.assert_close(one, two, **tolerance)
    for name, p in graft_parameters(hybrid).items():
        torch.testing.assert_close(other.get_parameter(name), p, **tolerance)


@one_of_each_graft
def test_in_bfloat16_losses_and_gradients_are_close(spliced, tokenizer):
    base, hybrid = spliced
    lesson, text = one_batch(tokenizer)
    with training(hybrid, trainable(hybrid, None)) as trained:
        found = [Distillation(hybrid, adopt(base), bf16=bf16)(*lesson, text)["loss"] for bf16 in (False, True)]
        assert found[1].item() == pytest.approx(found[0].item(), rel=5e-3)
        assert found[1].item() != found[0].item()
        one, two = (torch.cat([g.flatten() for g in gradients(loss, trained).values()]) for loss in found)
        assert one.dtype == two.dtype == torch.float32
        assert F.cosine_similarity(one, two, dim=0) > 0.98


def guarded(monkeypatch, figures):
    """Tuning that sees these figures (knowledge, perplexity, held-out loss), the base's first, then one set for each look."""
    shown = iter(figures)
    names = ("knowledge", "perplexity")
    monkeypatch.setattr(Guard, "measure", lambda *_: dict(zip(names, next(shown), strict=True)))


def test_the_best_weights_within_the_bounds_are_kept(hybrid, tokenizer, monkeypatch):
    good, bad = (0.9, 10.0), (0.88, 10.0)
    guarded(monkeypatch, [(0.9, 10.0), good, good, bad])
    seen, shown = [], iter([3.0, 1.0, 0.5])

    def held_out(*_):
        def losses(distillation):
            seen.append({name: p.detach().clone() for name, p in graft_parameters(distillation.student).items()})
            return {"retrieval": next(shown)}

        return losses

    monkeypatch.setattr(MicroBatches, "losses", held_out)
    options = SHORT.model_copy(update={"steps": 9, "early_stopping": EarlyStopping(eval_steps=2, examples=4, windows=2)})
    log = tune(hybrid, tokenizer, options, data=Data(skills=["knowledge"]))
    assert len(log) == 4  # it ended early
    assert (log[-1]["knowledge"], log[-1]["held_out"]) == (0.88, 0.5)
    assert all(torch.equal(p, seen[1][name]) for name, p in graft_parameters(hybrid).items())


@pytest.mark.parametrize(("figures", "allowed"), [((0.895, 10.05), True), ((0.88, 10.0), False), ((0.9, 10.2), False)])
def test_bounds(figures, allowed, tokenizer):
    guard = Guard(tokenizer, EarlyStopping(examples=2, windows=2), Data(), SHORT, 0)
    named = [dict(zip(("knowledge", "perplexity"), pair, strict=True)) | {"letters": 0.5} for pair in (figures, (0.9, 10.0))]
    assert guard.allows(*named) == allowed
    named[0]["letters"] = 0.4
    assert not guard.allows(*named)  # each skill has the bound


@pytest.mark.parametrize("bf16", [False, True])
def test_what_is_looked_at_for_the_bounds(bf16, hybrid, tokenizer):
    """In the student and in the base, each computed as in training."""
    guard = Guard(tokenizer, EarlyStopping(examples=6, windows=3), Data(), SHORT, 0)
    (ids, real), base = guard.text, adopt(unsplice(hybrid))
    distillation = Distillation(hybrid, base, bf16=bf16)
    for model, is_base in ((base, True), (hybrid, False)):
        found = guard.measure(distillation, is_base)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(input_ids=ids).logits[:, :-1].float()
        nll = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")[real[:, 1:]]
        assert found["perplexity"] == pytest.approx(nll.double().mean().exp().item(), rel=1e-6)
        assert 0 <= found["knowledge"] <= 1
