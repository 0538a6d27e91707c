"""Adapters on the base: what they match, that they learn, and what is left of them when they are merged."""

import json

import pytest
import torch
from peft import PeftModel

from surgery.errors import UserError
from surgery.jobs.entries import entries_of
from surgery.locating.locate import locate
from surgery.records.names import is_control
from surgery.records.plan import Plan
from surgery.records.recipe import Lesson, Lora, Recipe, Tune
from surgery.splicing.splice import adopt, graft_parameters, splice, unsplice
from surgery.tuning import lora
from surgery.tuning.distil import Distillation
from surgery.tuning.loop import tune
from surgery.tuning.lora import adapted, adapters
from surgery.tuning.trainable import trainable
from surgery.world.tokenizer import build_tokenizer
from tests.models import BASES, SAME, VOCABULARY, but_slow

FAMILIES = ["plain", "mamba", "falcon mamba", "llamba"]
TARGETS = {"plain": ("in_proj", "out_proj"), "llamba": ("in_proj", "out_proj", "gate_proj", "up_proj", "down_proj")}
SELECTIVE = ("in_proj", "x_proj", "out_proj")
PLAN = Plan(sites=("L1.H3",))
TOKENIZER = build_tokenizer()
SHORT = Tune(
    steps=3,
    batch_size=2,
    lessons=(Lesson(options={"pairs": (2, 4)}, queries=3),),
    text_batch_size=1,
    text_tokens=16,
    warmup_steps=0,
    save_steps=1,
    lora=Lora(target_modules=("in_proj",), r=2),
)


@pytest.fixture(params=FAMILIES, ids=lambda name: name.replace(" ", "-"))
def family(request):
    return request.param


def hybrid_of(family, **changes):
    base = BASES[family](**changes).to(torch.get_default_dtype())
    return base, splice(base, PLAN)


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def scatter(model):
    """Give adapters values as tuning would."""
    generator = torch.Generator().manual_seed(2)
    for name, p in adapters(model).items():
        p.data += torch.randn(p.shape, generator=generator) * (0.01 if "magnitude" in name else 0.02)


@torch.no_grad()
def logits(model, tokens):
    return model(input_ids=tokens, use_cache=False).logits


def test_every_module_that_is_accepted_learns(family, tokens):
    _, hybrid = hybrid_of(family)
    targets = TARGETS.get(family, SELECTIVE)
    with adapted(hybrid, Lora(target_modules=targets, r=2)):
        up = [p for name, p in adapters(hybrid).items() if ".lora_B." in name]
        assert len(up) == 3 * len(targets)
        for gradient in torch.autograd.grad(hybrid(input_ids=tokens).logits.square().sum(), up):
            assert gradient.abs().max() > 0


@pytest.mark.usefixtures("in_float64")
def test_merged_it_computes_the_same_and_the_base_is_as_it_was(family, tokens):
    base, hybrid = hybrid_of(family)
    before, untuned, parameters = values(base), logits(hybrid, tokens), dict(hybrid.named_parameters())
    with adapted(hybrid, Lora(target_modules=("0.mixer.in_proj", "2.mixer.out_proj"), r=2)):
        torch.testing.assert_close(logits(hybrid, tokens), untuned, **SAME)  # adapters start as nothing
        scatter(hybrid)
        unmerged = logits(hybrid, tokens)
    torch.testing.assert_close(logits(hybrid, tokens), unmerged, **SAME)
    assert (unmerged - untuned).abs().max() > 1e-2
    assert equal(values(base), before)
    changed = [name for name, p in hybrid.named_parameters() if p is not parameters[name]]
    assert sorted(changed) == ["backbone.layers.0.mixer.in_proj.weight", "backbone.layers.2.mixer.out_proj.weight"]
    assert not any(p.requires_grad for p in base.parameters())
    assert {name for name, p in hybrid.named_parameters() if p.requires_grad} == set(graft_parameters(hybrid))
    with adapted(hybrid, Lora(target_modules=("in_proj",))):
        scatter(hybrid)
    assert equal(values(unsplice(hybrid)), before)


def spoil(hybrid, value):
    with adapted(hybrid, Lora(target_modules=("in_proj",))):
        scatter(hybrid)
        if value is None:
            raise UserError("something else")
        list(adapters(hybrid).values())[-1].data.fill_(value)


def test_what_is_raised_within_leaves_the_model_as_it_was(tokens):
    _, hybrid = hybrid_of("plain")
    parameters, untuned = dict(hybrid.named_parameters()), logits(hybrid, tokens)
    for value, wanted in ((torch.nan, "not finite"), (None, "something else")):
        with pytest.raises(UserError, match=wanted):
            spoil(hybrid, value)
    assert all(p is parameters[name] for name, p in hybrid.named_parameters())
    assert torch.equal(logits(hybrid, tokens), untuned)
    assert not hasattr(hybrid, "peft_config")


@pytest.mark.parametrize(
    ("base", "target", "line"),
    [
        ("plain", "x_proj", "'x_proj' matches no module; there are in_proj, out_proj$"),
        ("plain", "conv1d", "would learn nothing: the model reads the weight of .*layers.0.mixer.conv1d but never calls it"),
        ("mamba", "conv1d", "would learn nothing"),
        ("llamba", "conv1d", "would learn nothing"),
        ("mamba", "dt_proj", "would learn nothing.*there are in_proj, out_proj, x_proj$"),
        ("plain", "q_proj", "'q_proj' is only in grafts, which are trained whole"),
        ("plain", "lm_head", "'lm_head' is outside the blocks"),
        ("plain", "mixer", "matches backbone.layers.0.mixer, a Mamba2HybridMixer; adapters need a Linear"),
    ],
)
def test_targets_that_would_train_nothing_are_refused(base, target, line):
    _, hybrid = hybrid_of(base)
    parameters = dict(hybrid.named_parameters())
    with pytest.raises(UserError, match=line) as caught, adapted(hybrid, Lora(target_modules=("in_proj", target))):
        pass
    assert "\n" not in str(caught.value)
    assert all(p is parameters[name] for name, p in hybrid.named_parameters())


def test_a_module_of_two_targets_is_refused():
    _, hybrid = hybrid_of("plain")
    with pytest.raises(UserError, match=r"'1.mixer.in_proj' matches .*1.mixer.in_proj, and so does 'in_proj'"):
        lora.matches(hybrid, Lora(target_modules=("in_proj", "1.mixer.in_proj")))


def test_the_table_counts_what_is_trained(capsys, tmp_path):
    _, hybrid = hybrid_of("mamba")
    with adapted(hybrid, Lora(target_modules={"x_proj": 2, "1.mixer.in_proj": 3}), out=tmp_path):
        assert sum(p.numel() for p in adapters(hybrid).values()) == 972
    table = capsys.readouterr().err
    first, _, *rows = table.splitlines()
    assert first == "lora: 972 trainable numbers in 4 modules"
    assert rows[0].split() == ["x_proj", "backbone.layers.*.mixer.x_proj", "3", "18", "x", "64", "2", "492"]
    assert (tmp_path / "lora.txt").read_text() == table


@pytest.mark.parametrize("family", but_slow(FAMILIES, "plain", "mamba"), indirect=True)
@pytest.mark.usefixtures("in_float64")
def test_tuned_it_is_held_to_the_base_without_adapters(family, tokens, monkeypatch):
    base, hybrid = hybrid_of(family, vocab_size=VOCABULARY)
    before, teachers = values(base), []
    wanted = logits(base, tokens)
    forward = Distillation.forward

    def watched(self, *args, **kwargs):
        with torch.no_grad(), self.as_teacher() as teacher:
            teachers.append(teacher(input_ids=tokens, use_cache=False).logits)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Distillation, "forward", watched)
    log = tune(hybrid, TOKENIZER, SHORT)
    assert [record["step"] for record in log] == [1, 2, 3]
    for given in teachers:
        torch.testing.assert_close(given, wanted, **SAME)
    assert equal(values(base), before)
    adapted_to = {name for name, p in values(hybrid).items() if ".graft." not in name and not torch.equal(p, before[name])}
    assert adapted_to == {f"backbone.layers.{i}.mixer.in_proj.weight" for i in range(3)}


def test_an_adapter_that_no_gradient_reaches_ends_the_run(monkeypatch):
    _, hybrid = hybrid_of("mamba", vocab_size=VOCABULARY)
    parameters = dict(hybrid.named_parameters())
    dead = lora.Match("dt_proj", "backbone.layers.1.mixer.dt_proj", 2)
    monkeypatch.setattr(lora, "matches", lambda *_: [dead])
    with pytest.raises(UserError, match=r"dt_proj.lora_A.* is to be trained, but no gradient reaches it"):
        tune(hybrid, TOKENIZER, SHORT)
    assert all(p is parameters[name] for name, p in hybrid.named_parameters())


ALL = SHORT.model_copy(update={"steps": 6, "lora": Lora(target_modules=("in_proj",), r=2, lora_dropout=0.1)})


@pytest.mark.usefixtures("in_float64")
def test_interrupted_and_resumed_it_ends_the_same_and_can_be_loaded_by_peft(tokens, tmp_path, monkeypatch):
    base, whole = hybrid_of("plain", vocab_size=VOCABULARY)
    log = tune(whole, TOKENIZER, ALL)
    hybrid, forward, calls = splice(base, PLAN), Distillation.forward, []

    def dying(*args, **kwargs):
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(Distillation, "forward", dying)
    with pytest.raises(KeyboardInterrupt):
        tune(hybrid, TOKENIZER, ALL, out=tmp_path)
    assert not (tmp_path / "adapter").exists()
    resumed = splice(base, PLAN)
    assert tune(resumed, TOKENIZER, ALL, out=tmp_path, resume=True) == log
    assert equal(values(resumed), values(whole))
    targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets), "the same file in every process"
    assert len(targets) > 1
    loaded = PeftModel.from_pretrained(splice(base, PLAN), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded, tokens), logits(whole, tokens), **SAME)
    other = ALL.model_copy(update={"lora": Lora(target_modules=("in_proj",), r=3)})
    with pytest.raises(UserError, match="another"):
        tune(splice(base, PLAN), TOKENIZER, other, out=tmp_path, resume=True)


def test_the_control_has_the_same_adapters():
    base = BASES["plain"](vocab_size=VOCABULARY)
    control = adopt(BASES["plain"](vocab_size=VOCABULARY))
    names, before = list(values(control)), values(control)
    tune(control, TOKENIZER, SHORT, layers=[1], teacher=adopt(base))
    assert list(values(control)) == names
    changed = {name for name, p in values(control).items() if not torch.equal(p, before[name])}
    own = {name for name in names if ".layers.1.mixer." in name}
    assert changed == own | {f"backbone.layers.{i}.mixer.in_proj.weight" for i in (0, 2)}
    assert not graft_parameters(control)


def test_beside_the_controls_stand_the_adapters_alone(base, tokenizer):
    ranking = locate(base, tokenizer, options={"pairs": 4}, examples=4, exact=False)
    bench = {"random_sites": 1}
    recipe = Recipe(model="base", tune={"lora": {"target_modules": ["in_proj"]}}, bench=bench)
    tuned = {}
    entries = entries_of(base, recipe, ranking, PLAN, None, lambda name, model, plan, layers=None: tuned.update({name: layers}))
    assert {name: layers for name, layers in tuned.items() if layers is not None} == {
        "control_tuned": [1], "control_lora_tuned": []
    }  # fmt: skip
    assert is_control("control_lora_tuned")
    model = entries["control_lora_tuned"].model
    assert trainable(model, []) == {}
    before = values(model)
    tune(model, tokenizer, SHORT, layers=[], teacher=base)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {f"backbone.layers.{layer}.mixer.in_proj.weight" for layer in range(len(model.backbone.layers))}
    without = Recipe(model="base", tune=recipe.tune, bench=bench | {"controls": False})
    for other in (Recipe(model="base", bench=bench), without):
        assert "control_lora_tuned" not in entries_of(base, other, ranking, PLAN, None, lambda name, model, *_: model)
