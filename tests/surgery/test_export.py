"""Exports: verified before they are there, whole or not there at all, and read by others."""

import json
import multiprocessing
import os
import re
import resource
import signal
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import surgery
from surgery.errors import UserError
from surgery.exporting import card, folder
from surgery.exporting.export import export
from surgery.exporting.formats import hf, patch
from surgery.exporting.verify import Proof
from surgery.models.answers import LENGTHS, NEW
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.records.record import provenance
from surgery.runtime.ownership import replacing
from surgery.runtime.ownership import steps as system
from surgery.runtime.ownership.folder import RECORD as OWN
from surgery.splicing.splice import graft_parameters, splice
from tests.models import VOCABULARY, random_base

PLAN = Plan(sites=("L1.H3",))
PROOF = Proof(reader="transformers", version="5", why=None, difference=0.0, tolerance=1e-4, prompts=LENGTHS, tokens=NEW)


@pytest.fixture
def hybrid(tokenizer):
    hybrid = splice(random_base(vocab_size=VOCABULARY), PLAN)
    with torch.no_grad():
        for p in graft_parameters(hybrid).values():
            p.add_(0.01)  # as if tuned
    return hybrid


def test_export_loads_everywhere_and_carries_its_papers(hybrid, tokenizer, tokens, tmp_path):
    proof = export(hybrid, tmp_path / "out", tokenizer=tokenizer, plan=PLAN, base="someone/base", recipe=Recipe(model="x"))
    assert proof.difference <= proof.tolerance
    assert {
        "plan.json", "recipe.yaml", "README.md", "model.safetensors", "mamba2.py", "tokenizer.json", "generation_config.json",
        "sites.png", "export.json",
    } <= set(os.listdir(tmp_path / "out"))  # fmt: skip
    assert os.listdir(tmp_path) == ["out"]  # no leftovers
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(reloaded(tokens).logits, hybrid(tokens).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == tokenizer.get_vocab()
    assert Plan.read(tmp_path / "out" / "plan.json") == PLAN
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "mamba2_hybrid"
    assert config["grafts"] == [
        {
            "kind": "head", "layer": 1, "heads": [3], "signs": [1], "width": 32, "shared": False, "direct": False,
            "time_step": True, "blend": None,
        }
    ]  # fmt: skip
    assert config["auto_map"]["AutoModelForCausalLM"] == "mamba2_hybrid.Mamba2HybridForCausalLM"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: someone/base" in card
    assert folder.check(tmp_path / "out").proof == proof
    loaded = surgery.load(tmp_path / "out")
    assert loaded.fingerprint == surgery.loading.digests.fingerprint(random_base(vocab_size=hybrid.config.vocab_size))


def test_large_weights_are_divided(hybrid, tokenizer, tokens, tmp_path, monkeypatch):
    export(hybrid, tmp_path / "out", tokenizer=tokenizer, plan=PLAN, base="b", max_shard_size="100KB")
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 3
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert torch.equal(surgery.load(tmp_path / "out").model(tokens).logits, hybrid(tokens).logits)
    with pytest.raises(UserError, match="cannot write the weights: "):
        export(hybrid, tmp_path / "bad", tokenizer=tokenizer, plan=PLAN, base="b", max_shard_size="much")
    assert os.listdir(tmp_path) == ["out"]


FORK = multiprocessing.get_context("fork")  # a child starts at once, with everything imported


def _in_child(work, *arguments):
    """Run `work` in a forked child; its exit status, negative if a signal killed it."""
    child = FORK.Process(target=work, args=arguments)
    child.start()
    child.join(60)
    return child.exitcode


@pytest.mark.parametrize("form", ["hf", "patch"])
def test_a_disk_that_fills_up_anywhere_leaves_the_previous_export(hybrid, tokenizer, tmp_path, monkeypatch, form):
    """No file may be larger than so many bytes: the system itself refuses, whoever writes, the library in Rust included."""
    base = random_base(vocab_size=hybrid.config.vocab_size)
    monkeypatch.setattr(folder, "prove", lambda *_, **__: PROOF)
    monkeypatch.setattr(patch, "load_base", lambda *_, **__: base)
    write = partial(export, hybrid, tmp_path / "out", format=form, tokenizer=tokenizer, plan=PLAN, base="b")
    write()
    before = folder.digests(tmp_path / "out")
    largest = max(path.stat().st_size for path in (tmp_path / "out").iterdir())

    def limited(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            write()
        except UserError as error:
            os._exit(3 if re.fullmatch(r"cannot write .*File too large.*", str(error)) else 4)
        os._exit(0)

    for limit in (0, 300, 3000, largest - 1):
        assert _in_child(limited, limit) == 3, limit
        assert folder.digests(tmp_path / "out") == before
        assert os.listdir(tmp_path) == ["out"]
    assert _in_child(limited, largest) == 0


@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "renamed"])
@pytest.mark.parametrize("earlier", [True, False], ids=["replaces", "first"])
def test_killed_at_any_step_leaves_the_old_folder_or_the_new(tmp_path, exchange, earlier):
    """A child builds a new folder and is killed before its nth step, for every n. Where folders cannot be exchanged, nothing
    stands under the name for one step; the next writer puts the old folder back."""

    def contents(place):
        if not place.exists():
            return None
        return {path.name: path.read_text() for path in place.iterdir() if path.name != OWN}

    def build(place, files):
        with replacing.building(place / "out") as new:
            with new.filling() as folder:
                for name, text in files.items():
                    (folder / name).write_text(text)
            new.replace()

    old, new = {"config.json": "old", "plan.json": "old"}, {"plan.json": "new", "README.md": "new"}

    def move(steps, place):
        for name in ("rename", "rmdir", "unlink"):
            setattr(os, name, _counted(getattr(os, name), steps))
        system.exchange = _counted(system.exchange, steps) if exchange else lambda *_: False
        build(place, new)
        os._exit(0)

    for steps in range(20):
        place = tmp_path / str(steps)
        place.mkdir()
        if earlier:
            build(place, old)
        status = _in_child(move, steps, place)
        there = contents(place / "out")
        assert there in ((old, new) if earlier else (None, new)) or (there is None and not exchange), steps
        replacing._sweep_beside(place / "out")
        assert contents(place / "out") in ((old, new) if earlier else (None, new)), steps
        assert {path.name for path in place.iterdir()} <= {"out"}  # and clears up
        if status == 0:
            assert contents(place / "out") == new
            break
        assert status == -signal.SIGKILL
    assert steps > (0 if not earlier else 3)


def _counted(function, steps):
    """The function; the process is killed instead of the call after `steps` of such calls."""

    def call(*arguments, **options):
        if _counted.calls == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        _counted.calls += 1
        return function(*arguments, **options)

    return call


_counted.calls = 0  # in every child from the start


@pytest.mark.parametrize("step", ["write", "prove", "card"])
def test_killed_while_it_is_written_leaves_the_previous_folder(hybrid, tokenizer, tmp_path, monkeypatch, step):
    monkeypatch.setattr(folder, "prove", lambda *_, **__: PROOF)
    write = partial(export, hybrid, tmp_path / "out", tokenizer=tokenizer, plan=PLAN, base="b")
    write()
    before = folder.digests(tmp_path / "out")

    def killed():
        die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        owner, name = {"write": (type(tokenizer), "save_pretrained"), "prove": (folder, "prove"), "card": (card, "card")}[step]
        setattr(owner, name, die)
        write()

    assert _in_child(killed) == -signal.SIGKILL
    assert folder.digests(tmp_path / "out") == before
    assert len(os.listdir(tmp_path)) == 2  # what was half written
    write()
    assert os.listdir(tmp_path) == ["out"]


def test_code_in_a_folder_runs_only_when_asked_for(hybrid, tokenizer, tokens, tmp_path):
    """With the package its own classes read a hybrid, and a type that it does not know is refused."""
    place = tmp_path / "out"
    place.mkdir()
    hf.write(hybrid, place, tokenizer=tokenizer, plan=PLAN, base="b")
    with (place / "mamba2.py").open("a") as code:
        code.write(f"\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    assert torch.equal(surgery.load(place).model(tokens).logits, hybrid(tokens).logits)
    config = json.loads((place / "config.json").read_text()) | {"model_type": "unheard_of"}
    (place / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="cannot load"):
        surgery.load(place)
    (place / "model.safetensors").unlink()
    torch.save({}, place / "pytorch_model.bin")
    (place / "config.json").write_text(json.dumps(config | {"model_type": "mamba2_hybrid"}))
    with pytest.raises(UserError, match="cannot load"):  # no pickle in the place of safetensors
        surgery.load(place)
    assert not (tmp_path / "ran").exists()


def test_the_card_says_of_the_base_only_what_is_so(hybrid, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "prove", lambda *_, **__: PROOF)
    mark = surgery.loading.digests.fingerprint(random_base(vocab_size=hybrid.config.vocab_size))
    plan = PLAN.model_copy(update={"provenance": provenance("b", mark, 0)})
    for unchanged in (True, False):
        export(hybrid, tmp_path / "out", tokenizer=tokenizer, plan=plan, base="b")
        assert ("every weight of the base is unchanged" in (tmp_path / "out" / "README.md").read_text()) == unchanged
        with torch.no_grad():
            hybrid.backbone.layers[0].mixer.D.add_(1)
