"""The command line: every verb on a small random model, and every wrong input."""

import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from surgery.cli import app as cli
from surgery.exporting import export as exporting
from surgery.kernels import dispatch
from surgery.world.tokenizer import build_tokenizer
from tests.models import ROOT, VOCABULARY, random_base

QUICK = """
locate: {options: {pairs: 4}, examples: 6}
tune: {steps: 3, batch_size: 2, lessons: [{options: {pairs: [2, 4]}, queries: 2}], text_batch_size: 1, text_tokens: 24,
       skill_batch_size: 2}
bench: {pairs: [4, 8], limit: 12, windows: 2, window: 32, contexts: [16, 32]}
"""
MODELS = (
    "base", "spliced", "tuned", "control_tuned", "control_random_site", "control_random_site_tuned", "control_random_site_2",
    "control_same_layer", "control_same_layer_tuned",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Mamba-2 with the world's tokenizer, a recipe for it, a Mamba-1 and a Llama."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = build_tokenizer()
    base = random_base(vocab_size=VOCABULARY)
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = LlamaConfig(**sizes, vocab_size=base.config.vocab_size)
    LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    (folder / "quick.yaml").write_text(f"model: {folder / 'base'}\n{QUICK}")
    return folder


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """The folder of a whole run, and what was printed. Do not change it."""
    place = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["surgery", "run", str(folder / "quick.yaml")])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert stop.value.code == 0
    return place / "runs" / "quick", out.getvalue()


def test_run_does_everything(finished):
    done, out = finished
    assert "control_random_site_tuned" in out
    report = json.loads((done / "report.json").read_text())
    assert tuple(report["models"]) == MODELS
    beside, tuned = (report["models"][f"control_same_layer{which}"]["plan"] for which in ("", "_tuned"))
    assert beside["sites"] == tuned["sites"] != report["plan"]["sites"]
    assert report["training"].keys() == {name for name in MODELS if name.endswith("tuned")}
    for name, model in report["models"].items():
        for size in ("4", "8"):
            assert model["kv"][size]["n"] == 12
            low, high = model["kv"][size]["ci95"]
            assert 0 <= low <= model["kv"][size]["accuracy"] <= high <= 1
        assert 0 <= model["knowledge"]["accuracy"] <= 1
        assert 0 <= model["letters"]["accuracy"] <= 1
        assert model["perplexity"]["value"] > 1
        assert [cost["context"] for cost in model["cost"]] == [16, 32]
        assert (model["change"] == {}) == (name == "base")
    assert report["models"]["tuned"]["cost"][1]["cache_bytes"] > report["models"]["base"]["cost"][1]["cache_bytes"]
    assert {"locate", "bench", "export", "tune tuned"} <= report["timings"].keys()
    assert report["cpu"].keys() == {"start", *report["timings"]}
    assert all(seconds > 0 for seconds in report["cpu"].values())
    assert report["provenance"]["recipe"]["locate"]["options"] == {"pairs": 4}
    assert report["plan"]["sites"]
    for name in ("report.md", "report.html", "mixing.json", "hybrid/report.json", "hybrid/report.html"):
        assert (done / name).stat().st_size > 500, name
    for name in ("atlas", "mixing", "retrieval", "cost", "grafts", "hybrid/retrieval"):
        assert (done / f"{name}.png").exists(), name
    AutoModelForCausalLM.from_pretrained(done / "hybrid")
    card = (done / "hybrid" / "README.md").read_text()
    assert f"{report['models']['tuned']['kv']['8']['accuracy']:.3f}" in card
    assert "control_tuned" in card


def written(folder):
    """When each of the files below a folder was written."""
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_is_not_overwritten_unasked(surgery, folder, finished, tmp_path, monkeypatch):
    done = shutil.copytree(finished[0], tmp_path / "runs" / "quick")
    before = written(done)
    status, out, err = surgery("run", folder / "quick.yaml")
    assert (status, out) == (2, "")
    offer = "--resume goes on with it, --overwrite replaces it (or choose another --out)"
    assert err == f"surgery: runs/quick holds an earlier run: {offer}\n"
    for verb in ("locate", "prune"):
        status, _, err = surgery(verb, folder / "base", "--out", "runs/quick")
        assert status == 2
        assert "holds an earlier run" in err
    status, _, err = surgery("bench", folder / "base", done / "hybrid", "--out", "runs/quick", "--resume")
    assert (status, "holds an earlier run of `surgery run`, which `surgery bench` cannot resume" in err) == (2, True)
    status, _, err = surgery("run", folder / "quick.yaml", "--resume", "--overwrite")
    assert (status, "give one of them" in err) == (2, True)
    status, _, err = surgery("run", folder / "quick.yaml", "--out", done / "hybrid", "--overwrite")  # holds a recipe, too
    assert (status, "is no earlier run of this toolkit" in err) == (2, True)
    assert written(done) == before

    monkeypatch.setattr(exporting, "free_disk", lambda _: 10)  # which is no matter where nothing is left to write
    status, out, err = surgery("run", folder / "quick.yaml", "--resume")
    assert "nothing has changed, and everything is finished" in err
    assert "Did it help?" in out
    after = written(done)
    assert {name for name in after if after[name] != before.get(name)} <= {
        Path(n) for n in ("recipe.yaml", "run.json", "plan.json")
    }


def test_resume_repeats_nothing_that_is_done(surgery, folder, finished, tmp_path):
    """Also that what is done again is what changed, and what depends on it."""
    done = shutil.copytree(finished[0], tmp_path / "runs" / "quick")
    first, before = json.loads((done / "report.json").read_text()), written(done)
    cells = {name for name in before if name.parts[0] == "cells"}
    assert len(cells) == len(MODELS) * 6 + 2  # and what tokens cost after two contexts, of all models at once

    def again(*settings):
        """Resume: (standard error, the report, the files that were written)."""
        earlier = written(done)
        status, _, err = surgery("run", folder / "quick.yaml", "--resume", *(part for s in settings for part in ("--set", s)))
        assert status == 0, err
        now = written(done)
        return err, json.loads((done / "report.json").read_text()), {n for n in now if now[n] != earlier.get(n)}

    def kept(changed):
        """Nothing was located or tuned again."""
        return not any(n.name == "ranking.json" or n.name.startswith("checkpoint") or "checkpoint" in str(n) for n in changed)

    shutil.rmtree(done / "hybrid")
    (done / "report.json").unlink()
    _, second, changed = again()
    assert kept(changed)
    assert not changed & cells
    for name in MODELS:
        assert second["models"][name]["kv"] == first["models"][name]["kv"]
        assert second["models"][name]["perplexity"] == first["models"][name]["perplexity"]

    fewer = ("bench.controls=false", "bench.limit=6")
    err, second, changed = again(*fewer)
    assert "bench.limit was 12 and is 6: going on from bench" in err
    assert kept(changed)
    assert second["models"]["tuned"]["kv"]["8"]["n"] == 6
    assert second["models"]["tuned"]["conditions"] == first["models"]["tuned"]["conditions"]

    err, second, changed = again(*fewer, "tune.steps=1")
    assert "tune.steps was 3 and is 1: going on from tune" in err
    assert "tuning tuned again" in err
    assert Path("ranking.json") not in changed
    assert Path("tuning/tuned/checkpoint-1/state.json") in changed
    assert second["models"]["tuned"]["conditions"]["model"] != first["models"]["tuned"]["conditions"]["model"]


def test_the_verbs_one_by_one(surgery, folder, tmp_path):
    common = ("--recipe", folder / "quick.yaml")
    assert surgery("locate", folder / "base", *common, "--set", "locate.exact=false", "--out", "ranked")[0] == 0
    assert surgery("plan", "ranked/ranking.json", "--set", "plan.heads=2")[0] == 0
    assert surgery("splice", folder / "base", "ranked/plan.json", "--out", "spliced")[0] == 0
    assert surgery("tune", "spliced", *common, "--out", "tuned")[0] == 0
    assert surgery("export", "tuned", "--format", "hf", "--out", "published")[0] == 0
    status, _, err = surgery("bench", folder / "base", "spliced", "published", *common, "--out", "compared")
    assert status == 0, err
    report = json.loads((tmp_path / "compared" / "report.json").read_text())
    assert tuple(report["models"]) == ("base", "spliced", "published", "control_tuned")  # as `published` was, without a graft
    assert "control_tuned: no graft: the base's own mixer of" in err
    assert "3 steps, about" in err
    again = ("bench", folder / "base", "spliced", "published", *common, "--out", "compared")
    status, _, err = surgery(*again, "--resume")
    assert (status, "nothing has changed" in err, "steps, about" in err) == (0, True, False), err
    status, _, err = surgery(*again, "--overwrite", "--set", "bench={controls: false, pairs: [4], contexts: []}")
    report = json.loads((tmp_path / "compared" / "report.json").read_text())
    assert tuple(report["models"]) == ("base", "spliced", "published")
    tokens = torch.arange(1, 30)[None]
    base, spliced, published = (
        AutoModelForCausalLM.from_pretrained(p).eval() for p in (folder / "base", "spliced", "published")
    )
    assert not torch.equal(base(tokens).logits, spliced(tokens).logits)
    assert not torch.equal(spliced(tokens).logits, published(tokens).logits)


def _damage(folder, tmp_path, name):
    """A copy of the base with something wrong in it."""
    copy = tmp_path / name
    shutil.copytree(folder / "base", copy)
    weights = copy / "model.safetensors"
    if name == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif name == "no-weights":
        weights.unlink()
    elif name == "bad-json":
        (copy / "config.json").write_text("{")
    else:
        config = json.loads((copy / "config.json").read_text())
        config |= {"unknown-field": {"rope_theta": 10000.0}, "missing-layer": {"num_hidden_layers": 4}}[name]
        (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ("truncated", "cannot load"),
        ("no-weights", "cannot load"),
        ("bad-json", "is not JSON"),
        ("unknown-field", "field 'rope_theta'"),
        ("missing-layer", "missing keys"),
    ],
)
def test_a_damaged_model_is_refused(surgery, folder, tmp_path, wrong, complaint):
    model = _damage(folder, tmp_path, wrong)
    for verb in (("run", folder / "quick.yaml", "--set", f"model={model}"), ("locate", model)):
        _refused(surgery, verb, complaint, tmp_path, {wrong})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("run", "{f}/quick.yaml", "--set", "model=./nowhere"), "no such folder"),
        (("run", "{f}/quick.yaml", "--set", "model=nobody/no-such-model"), "the Hub may not be asked (HF_HUB_OFFLINE is set)"),
        (("run", "{f}/quick.yaml", "--set", "model={f}/llama"), "model type 'llama' is not supported"),
        (("run", "{f}/quick.yaml", "--set", "model={f}"), "holds no config.json"),
        (("run", "{f}/quick.yaml", "--set", "plan.sites=[L7.H0]"), "no site L7.H0"),
        (("run", "{f}/quick.yaml", "--set", "data.held_out_text=./none.txt"), "cannot read the text"),
        (("run", "{f}/quick.yaml", "--set", "data.facts=./none.jsonl"), "cannot read the facts"),
        (("run", "{f}/quick.yaml", "--set", "kernels.ssd_scan=fast"), "ssd_scan has no backend named 'fast'"),
        (("locate", "{f}/base", "--set", "kernels.ssd_step=mamba_ssm"), "cannot serve: it runs on CUDA devices"),
        (("run", "./no.yaml"), "cannot read the recipe"),
        (("locate", "{f}/base", "--out", "/dev/null/out"), "cannot write"),
        (("locate", "{f}/base", "--set", "locate.pairs=8"), "unknown key 'locate.pairs'"),
        (("prune", "{f}/base", "--set", "locate.probe=copying", "--set", "locate.options.length=4"), "asks for completions"),
        (("plan", "./no.json"), "cannot read"),
        (("table", "{f}", "./no.json"), "cannot read no.json"),
        (("splice", "{f}/base", "./no.json", "--out", "x"), "cannot read"),
        (("tune", "{f}/base", "--out", "x"), "is no hybrid: it holds no plan.json"),
        (("export", "{f}/base", "--format", "onnx", "--out", "x"), "cannot export as 'onnx'"),
        (("bench", "{f}/base", "./nowhere"), "no such folder"),
        (("pretrain", "{f}/quick.yaml", "--out", "x"), "is a recipe for `surgery run`"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(surgery, folder, tmp_path, arguments, complaint):
    _refused(surgery, [a.format(f=folder) for a in arguments], complaint, tmp_path, set())


def test_a_layer_from_a_donor(surgery, folder, finished, tmp_path):
    """Step by step: the plan names a layer and a donor, the graft is that donor's, and tuning holds it to the base."""
    quick = ("--recipe", folder / "quick.yaml")
    layer = (finished[0] / "ranking.json", "--set", "plan.kind=layer", "--set", f"plan.donor={folder / 'llama'}")
    assert surgery("plan", *layer, "--set", "plan.sites=[L1]", "--set", "plan.mlp=true", "--out", "plan.json")[0] == 0
    assert surgery("splice", folder / "base", "plan.json", "--out", "spliced")[0] == 0
    hybrid = AutoModelForCausalLM.from_pretrained(tmp_path / "spliced")
    donor = AutoModelForCausalLM.from_pretrained(folder / "llama").model.layers[1]
    assert torch.equal(hybrid.backbone.layers[1].mixer.graft.q_proj.weight, donor.self_attn.q_proj.weight)
    assert "`llama`" in (tmp_path / "spliced" / "README.md").read_text()  # and not where it lies
    status, _, err = surgery("tune", "spliced", *quick, "--set", "tune.steps=2", "--out", "tuned")
    assert status == 0, err
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert not torch.equal(tuned.backbone.layers[1].mixer.graft.q_proj.weight, donor.self_attn.q_proj.weight)
    status, _, err = surgery("plan", *layer, "--set", "plan.sites=[L1.H2]", "--out", "wrong.json")
    assert (status, err) == (2, "surgery: --set: plan.sites: L1.H2 names heads; a layer graft takes a whole layer, e.g. L1\n")


@pytest.mark.parametrize(
    ("site", "complaint"), [("L7.H0", "no site L7.H0: its layers are 0 to"), ("L0.H1,99", "no site L0.H99: layer 0 has")]
)
def test_a_plan_refuses_sites_that_the_ranked_model_does_not_have(surgery, finished, site, complaint):
    status, _, err = surgery("plan", finished[0] / "ranking.json", "--set", f"plan.sites={site}", "--out", "wrong.json")
    assert status == 2
    assert complaint in err


def test_a_recipe_chooses_kernels(surgery, folder, tmp_path):
    """Another kernel, the same ranking up to rounding; and nothing is asked for afterwards."""
    attributions = []
    for name, kernels in (("stock", "{ssd_scan: stock, graft_attention: reference}"), ("ours", "{}")):
        settings = ("--set", f"kernels={kernels}", "--set", "locate.exact=false")
        assert surgery("locate", folder / "base", "--recipe", folder / "quick.yaml", *settings, "--out", name)[0] == 0
        ranking = json.loads((tmp_path / name / "ranking.json").read_text())
        attributions.append({head["site"]: head["attribution"]["value"] for head in ranking["heads"]})
    assert attributions[0] != attributions[1]
    assert attributions[0] == pytest.approx(attributions[1], rel=1e-2, abs=1e-4)
    assert dispatch.requested() == {}


def test_a_plan_for_another_base_is_refused(surgery, folder, finished, tmp_path):
    plan = finished[0] / "plan.json"
    other = tmp_path / "other"
    shutil.copytree(folder / "base", other)
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.backbone.norm_f.weight[0] += 1
    model.save_pretrained(other)
    _refused(surgery, ("splice", other, plan, "--out", "x"), "made for another base", tmp_path, {"other"})


def _refused(surgery, arguments, complaint, tmp_path, there):
    status, out, err = surgery(*arguments)
    assert status == 2, (out, err)
    assert complaint in err
    assert err.startswith("surgery: ")
    assert err.count("\n") == 1, err
    assert out == ""
    assert {path.name for path in tmp_path.iterdir()} == there, "something was written"


@pytest.mark.slow
def test_as_a_user_types_it(tmp_path):
    """A real process: no traceback, no library chatter."""
    command = [sys.executable, "-m", "surgery", "run", str(ROOT / "recipes" / "demo.yaml"), "--set", "model=./nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "surgery: no such folder: ./nowhere\n"
    assert list(tmp_path.iterdir()) == []
