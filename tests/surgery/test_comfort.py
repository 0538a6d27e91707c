"""A hybrid in a user's hands: it remembers its plan and its base, only its grafts learn, and they can be switched off."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import surgery
from surgery.errors import UserError
from surgery.exporting.source import base_of
from surgery.hybrids.patching import note_of
from surgery.locating.heads import Score
from surgery.records.plan import Plan
from surgery.splicing.remembered import recalled
from surgery.splicing.splice import adopt, graft_parameters, splice, unsplice
from surgery.statistics import Estimate
from tests.models import BASES, VOCABULARY, random_base
from tests.surgery.test_layer_graft import random_donor

HEADS = Plan(sites=("L0.H1", "L1.H3,5"))
LAYER = Plan(kind="layer", sites=("L1",))
WITH_MLP = Plan(kind="layer", sites=("L1", "L2"), donor="the donor", mlp=True)
CASES = {
    "heads": ("plain", HEADS), "layer": ("plain", LAYER), "Mamba-1's layer": ("mamba, biases, untied", LAYER),
    "blocks of a donor": ("plain", WITH_MLP), "llamba's blocks": ("llamba", WITH_MLP),
}  # fmt: skip


@pytest.fixture
def folder(tokenizer, tmp_path):
    """A base in a folder, with its tokenizer."""
    random_base(vocab_size=VOCABULARY).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def built(case):
    family, plan = CASES[case]
    base = BASES[family]()
    return base, splice(base, plan, random_donor() if plan.donor else None)


@torch.no_grad()
def told(model, tokens):
    """Logits of a padded batch, and tokens from a cache."""
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return model(tokens, attention_mask=mask).logits, model.generate(tokens, max_new_tokens=3, do_sample=False)


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_without_its_grafts_a_hybrid_is_its_base(case, tokens):
    base, hybrid = built(case)
    expected, grafted = told(adopt(base), tokens), told(hybrid, tokens)
    assert not torch.equal(expected[0], grafted[0])
    with hybrid.disable_grafts():
        assert equal(told(hybrid, tokens), expected)
        with hybrid.disable_grafts():  # once more changes nothing
            assert equal(told(hybrid, tokens), expected)
        assert equal(told(hybrid, tokens), expected)
    assert equal(told(hybrid, tokens), grafted)
    with pytest.raises(ZeroDivisionError), hybrid.disable_grafts():
        raise ZeroDivisionError
    assert equal(told(hybrid, tokens), grafted)
    assert equal(told(unsplice(hybrid), tokens), told(base, tokens))


def test_a_layer_graft_from_a_folder_cannot_be_switched_off(tokens, tmp_path):
    _, hybrid = built("layer")
    hybrid.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    before = told(loaded, tokens)
    with pytest.raises(UserError, match="layer graft in L1 cannot be switched off"), loaded.disable_grafts():
        pass
    assert equal(told(loaded, tokens), before)


def test_merged_adapters_are_switched_off_too(tokens, tokenizer):
    base = random_base(vocab_size=VOCABULARY)
    hybrid, expected = splice(base, HEADS), told(adopt(base), tokens)
    options = surgery.Recipe(model="x", tune={
        "steps": 2, "batch_size": 2, "text_batch_size": 1, "text_tokens": 16, "lora": {"target_modules": ["in_proj"]},
        "lessons": [{"options": {"pairs": 2}}],
    }).tune  # fmt: skip
    surgery.tune(hybrid, tokenizer, options)
    tuned = told(hybrid, tokens)
    with hybrid.disable_grafts():
        assert equal(told(hybrid, tokens), expected)
    assert equal(told(hybrid, tokens), tuned)
    trained = {name for name, p in hybrid.named_parameters() if p.requires_grad}
    assert trained == set(graft_parameters(hybrid))  # tune puts back what it found


@pytest.mark.parametrize("case", ["heads", "layer", "llamba's blocks"])
def test_only_grafts_learn_until_unsplice(case):
    base = BASES[CASES[case][0]]()
    next(iter(base.parameters())).requires_grad_(False)  # the user's own choice
    before = {name: p.requires_grad for name, p in base.named_parameters()}
    donor = random_donor() if CASES[case][1].donor else None
    first, second = splice(base, CASES[case][1], donor), splice(base, HEADS)
    for hybrid in (first, second):
        assert {name for name, p in hybrid.named_parameters() if p.requires_grad} == set(graft_parameters(hybrid))
    assert not any(p.requires_grad for p in base.parameters())
    for hybrid in (copy.deepcopy(first), second, first):
        restored = unsplice(hybrid)
        assert {name: p.requires_grad for name, p in restored.named_parameters()} == before
    assert {name: p.requires_grad for name, p in base.named_parameters()} == before
    adopt(base)
    assert {name: p.requires_grad for name, p in base.named_parameters()} == before


def test_pushed_to_the_hub_a_hybrid_does_not_say_where_its_base_lies(folder, tmp_path, monkeypatch):
    hybrid = splice(surgery.load(folder), HEADS)
    sent = {}

    def send(self, path, *_, **__):
        sent.update({file.name: file.read_text() for file in Path(path).glob("*.json")})

    monkeypatch.setattr(
        "transformers.utils.hub.hf_api", lambda: SimpleNamespace(create_repo=lambda *_, **__: SimpleNamespace(repo_id="me/it"))
    )
    monkeypatch.setattr(
        "transformers.utils.hub.create_and_tag_model_card", lambda *_, **__: SimpleNamespace(save=lambda _: None)
    )
    monkeypatch.setattr(type(hybrid), "_upload_modified_files", send)
    hybrid.push_to_hub("me/it")
    assert json.loads(sent["base.json"])["base"]["name"] == "base"
    assert not any(tmp_path.name in text for text in sent.values())
    assert hybrid.surgery.base == str(folder)  # here it is still known


def test_of_the_hub_a_plan_is_read_at_the_revision_of_the_weights(monkeypatch):
    _, hybrid = built("heads")
    hybrid.config._commit_hash = "abc"
    read = {}
    monkeypatch.setattr("surgery.splicing.remembered.cached_file", lambda *_, **options: read.update(options))
    assert recalled(hybrid) is None
    assert read["revision"] == "abc"


def test_what_learns_is_printed_as_peft_does(capsys):
    _, hybrid = built("heads")
    hybrid.print_trainable_parameters()
    trained = sum(p.numel() for p in graft_parameters(hybrid).values())
    total = sum(p.numel() for p in hybrid.parameters())
    expected = f"trainable params: {trained:,} || all params: {total:,} || trainable%: {100 * trained / total:.4f}\n"
    assert capsys.readouterr().out == expected


def test_a_hybrid_remembers_what_was_done(folder, tokenizer, tokens, tmp_path, monkeypatch):
    """In memory, in a folder of save_pretrained and in an export; each of them can be exported with no more than its name."""
    base = surgery.load(folder)
    for given in (base, base.model, adopt(base.model)):
        hybrid = surgery.splice(given, HEADS)
        assert hybrid.surgery.plan is HEADS
        assert (hybrid.surgery.base, hybrid.surgery.base_fingerprint) == (str(folder), base.fingerprint)
    expected = told(hybrid, tokens)
    assert note_of(unsplice(hybrid), "opened").name == str(folder)
    surgery.export(hybrid, tmp_path / "exported")
    hybrid.save_pretrained(tmp_path / "saved", tokenizer=tokenizer)
    monkeypatch.chdir("/")  # places are kept as seen from the folder, not from where the user stood
    for place in (tmp_path / "exported", tmp_path / "saved"):
        loaded = surgery.load(place)
        assert loaded.model.surgery.plan == HEADS
        assert (loaded.model.surgery.base, loaded.fingerprint) == (str(folder), base.fingerprint)
        assert base_of(str(place)) == str(folder)
        assert equal(told(loaded.model, tokens), expected)
        assert {n for n, p in loaded.model.named_parameters() if p.requires_grad} == set(graft_parameters(loaded.model))
        plain = AutoModelForCausalLM.from_pretrained(place)
        assert plain.surgery == loaded.model.surgery
        proof = surgery.export(plain, tmp_path / place.name / "again")
        assert proof.difference <= proof.tolerance
        assert base_of(str(tmp_path / place.name / "again")) == str(folder)
    assert not (tmp_path / "exported" / "base.json").exists()  # export.json says it
    assert str(tmp_path) not in (tmp_path / "saved" / "base.json").read_text()
    surgery.export(loaded, tmp_path / "patch", format="patch")
    patched = surgery.load(tmp_path / "patch")
    assert (patched.model.surgery.plan, patched.model.surgery.base) == (HEADS, str(folder))
    assert patched.model.surgery.base_fingerprint == base.fingerprint
    surgery.export(patched, tmp_path / "from a patch")


def test_a_base_of_transformers_own_is_known_by_its_folder(folder, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(folder)
    hybrid = splice(base, HEADS)
    assert (hybrid.surgery.base, hybrid.surgery.base_fingerprint) == (str(folder), surgery.load(folder).fingerprint)
    surgery.export(hybrid, tmp_path / "out")  # the tokenizer is that of the base's folder
    assert (tmp_path / "out" / "tokenizer.json").exists()
    with pytest.raises(UserError, match="does not remember its base: say which it is"):
        surgery.export(splice(random_base(), HEADS), tmp_path / "nameless")


def test_what_is_given_to_export_is_what_counts(folder, tmp_path):
    base = surgery.load(folder)
    hybrid = surgery.splice(base, HEADS)
    other = HEADS.model_copy(update={"seed": 5})
    surgery.export(hybrid, tmp_path / "out", plan=other, base="someone/base")
    assert Plan.read(tmp_path / "out" / "plan.json") == other
    assert json.loads((tmp_path / "out" / "export.json").read_text())["base"]["name"] == "someone/base"


def test_wrong_types_are_named(folder, tmp_path):
    base = surgery.load(folder)
    ranking = surgery.Ranking.model_construct()
    hybrid = splice(base, HEADS)
    wrong = {
        r"surgery\.splice takes a plan, as surgery\.plan\(ranking\) returns it, not a Ranking": lambda: splice(base, ranking),
        r"a plan, not its name; read it first: surgery\.Plan\.read\('plan\.json'\)": lambda: splice(base, "plan.json"),
        r"surgery\.splice takes a model, not its name; load it first": lambda: splice("somewhere", HEADS),
        r"takes a hybrid, and this model holds no grafts: splice it": lambda: surgery.export(base, tmp_path / "x"),
        r"surgery\.export takes a tokenizer as .* not a dict": lambda: surgery.export(hybrid, tmp_path / "x", tokenizer={}),
        r"surgery\.export: base is the base's name": lambda: surgery.export(hybrid, tmp_path / "x", base=3),
        r"nothing to tune: the model holds no grafts; splice it first": lambda: surgery.tune(base),
        r"surgery\.tune takes a tokenizer as .* not a Plan": lambda: surgery.tune(hybrid, HEADS),
        r"surgery\.tune needs a tokenizer": lambda: surgery.tune(splice(random_base(), HEADS)),
        r"surgery\.bench takes a model as surgery\.load returns it, not a Plan": lambda: surgery.bench(base, HEADS),
        r"surgery\.bench needs a tokenizer": lambda: surgery.bench(random_base(), splice(random_base(), HEADS)),
        r"surgery\.bench takes models, bench\(base, hybrid\), or one dictionary": lambda: surgery.bench({"base": base}, hybrid),
    }
    for message, call in wrong.items():
        with pytest.raises(UserError, match=message):
            call()
    assert not (tmp_path / "x").exists()


def test_a_misspelt_name_is_told_what_was_meant():
    """In one line, before anything is done."""
    wrong = {
        r"surgery\.locate has no keyword 'exmaples'; did you mean examples\?": lambda: surgery.locate(None, exmaples=8),
        r"no keyword 'steps'; it is a setting: options=surgery\.Tune\(steps=\.\.\.\)": lambda: surgery.tune(None, steps=2),
        r"it is a setting: data=surgery\.Data\(train_text=": lambda: surgery.tune(None, train_text="a.txt"),
        r"surgery\.Tune has no setting 'lr'; did you mean learning_rate\?": lambda: surgery.Tune(lr=1e-3),
        r"^surgery\.Tune: steps\.[^\n]*$": lambda: surgery.Tune(steps=-1),
    }
    for message, call in wrong.items():
        with pytest.raises(UserError, match=message):
            call()


def test_what_is_shown_of_things_is_short():
    """And dir() shows what is public."""
    score = Score(site="L0.H1", splice_loss=Estimate(value=0.5, ci95=(0.4, 0.6), n=8), role="gather")
    for thing, words in ((HEADS, "L0.H1; L1.H3,5"), (splice(random_base(), HEADS), "L0.H1; L1.H3,5"), (score, "L0.H1, gather")):
        assert words in repr(thing)
        assert len(repr(thing)) < 200
    assert dir(surgery) == sorted([*surgery.__all__, "__version__"])


QUICK = surgery.Recipe(model="x", bench={"pairs": [4], "limit": 20, "windows": 2, "window": 32, "contexts": []}).bench


def test_bench_takes_models_and_gives_a_report(folder, tmp_path, capsys):
    base = surgery.load(folder)
    hybrid = surgery.splice(base, HEADS)
    report = surgery.bench(base, hybrid, options=QUICK, cells=tmp_path)
    assert list(report.models) == ["base", "hybrid"]
    assert report.plan == report["hybrid"].plan == HEADS
    assert (report.provenance.base, report.provenance.base_fingerprint) == ("base", base.fingerprint)
    report.write(tmp_path / "report.json")
    assert surgery.Report.read(tmp_path / "report.json") == report
    text = repr(report)
    assert text.splitlines()[0].split() == ["base", "hybrid"]
    assert text.splitlines()[1].split() == ["KV", "4", f"{report['base'].kv['4'].accuracy:.3f}",
                                            f"{report['hybrid'].kv['4'].accuracy:.3f}"]  # fmt: skip
    assert "Did it help? " in text
    assert max(map(len, text.splitlines())) <= 80
    report.show()
    assert capsys.readouterr().out == f"{text}\n"
    names = surgery.bench({"one": base.model, "two": hybrid}, base.tokenizer, QUICK, cells=tmp_path)
    assert {name: model.kv for name, model in names.models.items()} == {
        "one": report["base"].kv, "two": report["hybrid"].kv,
    }  # fmt: skip
    again = surgery.bench(base.model, hybrid, hybrid, base, options=QUICK, cells=tmp_path)
    assert list(again.models) == ["base", "hybrid", "hybrid_2", "base_2"]
    other = replace(base, tokenizer=copy.deepcopy(base.tokenizer))
    other.tokenizer.add_tokens(["another"])
    with pytest.raises(UserError, match="hybrid has another tokenizer than the others"):
        surgery.bench(other, hybrid, options=QUICK)


def test_a_report_shows_its_page_in_a_notebook(folder, tmp_path, monkeypatch):
    base = surgery.load(folder)
    report = surgery.bench(base, options=QUICK)
    shown = []
    notebook = ModuleType("IPython")
    notebook.get_ipython = lambda: SimpleNamespace(kernel=object())
    display = ModuleType("IPython.display")
    display.HTML, display.display = str, shown.append
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    report.show()
    assert len(shown) == 1
    assert shown[0].startswith('<iframe srcdoc="&lt;!doctype html&gt;')
