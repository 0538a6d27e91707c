"""Several processes and several attempts give the ranking that one process gives at once."""

import json
import os
import pickle
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import debug_launcher
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from surgery.cli import app as cli
from surgery.figures.views import results
from surgery.jobs.locating_stage import located
from surgery.jobs.opening import open_checkpoint
from surgery.locating import exact, prefilter
from surgery.records.recipe import read_recipe
from surgery.world.tokenizer import build_tokenizer
from tests.models import SAME, VOCABULARY, names, random_base

# Ten batches, so that there are three decisions on whom to give up; and a second ranking to compare with.
SETTINGS = [
    "locate.options.pairs=3", "locate.examples=20", "locate.batch_size=2", "locate.exact=0.5", "locate.ablation=mean",
    "locate.seeds=2",
]  # fmt: skip
ASKED = [part for setting in SETTINGS for part in ("--set", setting)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "base"
    tokenizer = build_tokenizer()
    random_base(vocab_size=VOCABULARY, num_hidden_layers=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def watch(patch):
    """Count how many batches are walked through and attributed; "stop": after so many walks, an interrupt."""
    counts = {"walks": 0, "attributions": 0, "stop": None}

    def watched(module, name, what):
        own = getattr(module, name)

        def call(*args, **kwargs):
            if what == "walks" and counts["walks"] == counts["stop"]:
                raise KeyboardInterrupt
            counts[what] += 1
            return own(*args, **kwargs)

        patch.setattr(module, name, call)

    watched(exact.walk, "variants", "walks")
    watched(prefilter, "attribute_starts", "attributions")
    return counts


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """What one process finds at once, and what that took."""
    out = tmp_path_factory.mktemp("whole")
    recipe = read_recipe(None, SETTINGS, model=str(folder))
    with pytest.MonkeyPatch.context() as patch:
        counts = watch(patch)
        located(recipe, open_checkpoint(recipe), out)
    return said(out), counts


def said(out):
    """What was found; when and where does not matter."""
    found = json.loads((out / "ranking.json").read_text())
    del found["provenance"], found["seal"]  # the seal is over both
    return found


def as_one_of_several(place, arguments):
    """The command in a process that accelerate forked; what it prints goes to a file of its own."""
    AcceleratorState._reset_state(reset_partial_state=True)  # the parent's, which is alone
    os.chdir(place)
    sys.argv = ["surgery", *arguments]
    with Path(f"printed by {torch.distributed.get_rank()}").open("w") as out, redirect_stdout(out):
        cli.main()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a forked process cannot use CUDA")
def test_the_number_of_processes_changes_nothing(folder, whole, tmp_path):
    debug_launcher(as_one_of_several, (tmp_path, ["locate", str(folder), *ASKED, "--out", "two"]), num_processes=2)
    printed = [(tmp_path / f"printed by {rank}").read_text() for rank in range(2)]
    assert "Accuracy of the base" in printed[0]
    assert printed[1] == ""
    assert said(tmp_path / "two") == whole[0]
    assert {*names(tmp_path / "two")} == {"run.json", "recipe.yaml", "ranking.json", "atlas.png", "mixing.png"}


RUN_SETTINGS = [
    "locate.options.pairs=3", "locate.examples=8", "tune.steps=2", "tune.batch_size=2", "tune.text_batch_size=2",
    "tune.text_tokens=16", "tune.lessons=[{options: {pairs: 3}}]", "bench.pairs=[3]", "bench.limit=6", "bench.windows=2",
    "bench.window=16", "bench.contexts=[16]", "bench.controls=false",
]  # fmt: skip


@pytest.mark.slow  # locating in two processes is tested above, tuning in test_tune_scale.py
@pytest.mark.skipif(torch.cuda.is_available(), reason="a forked process cannot use CUDA")
@pytest.mark.usefixtures("in_float64")
def test_a_run_in_two_processes_ends_with_the_report_of_one(surgery, folder, tmp_path, monkeypatch):
    """In float64, where the processes' sums differ by roundings alone."""
    monkeypatch.setattr(results, "draw", lambda *_: None)
    (tmp_path / "recipe.yaml").write_text(f"model: {folder}\ndtype: float64\n")
    settings = [part for setting in RUN_SETTINGS for part in ("--set", setting)]
    debug_launcher(as_one_of_several, (tmp_path, ["run", "recipe.yaml", *settings, "--out", "two"]), num_processes=2)
    assert surgery("run", "recipe.yaml", *settings, "--out", "one")[0] == 0
    one, two = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "two"))
    assert one["models"].keys() == two["models"].keys()
    for name, model in one["models"].items():
        for figures in ("kv", "knowledge", "letters"):
            assert two["models"][name][figures] == model[figures]
        assert two["models"][name]["perplexity"]["value"] == pytest.approx(model["perplexity"]["value"], rel=1e-9)
    assert two["training"]["tuned"] == pytest.approx(one["training"]["tuned"], rel=1e-9)
    ours, others = (load_file(tmp_path / name / "hybrid" / "model.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(others, ours, **SAME)
    written = [{path.relative_to(tmp_path / name) for path in (tmp_path / name).glob("*")} for name in ("one", "two")]
    assert written[0] == written[1]
    assert (tmp_path / "printed by 1").read_text() == ""


@pytest.mark.slow
def test_an_interrupted_locate_goes_on_where_it_was(surgery, folder, whole, tmp_path, monkeypatch):
    counts = watch(monkeypatch)
    counts["stop"] = 13
    assert surgery("locate", folder, *ASKED, "--out", "parts")[0] != 0
    assert counts["attributions"] == 10 + 15  # of the first ranking, and on the skills of the base
    kept = {path.name for path in (tmp_path / "parts" / "locate").iterdir()}
    assert len(kept) == 13 + 10 + 15
    assert not (tmp_path / "parts" / "ranking.json").exists()

    status, out, err = surgery("locate", folder, *ASKED, "--out", "parts")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "parts holds an earlier run" in err
    assert {path.name for path in (tmp_path / "parts" / "locate").iterdir()} == kept

    counts["stop"] = None
    assert surgery("locate", folder, *ASKED, "--out", "parts", "--resume")[0] == 0
    assert {**counts, "stop": None} == whole[1]  # both attempts together
    assert said(tmp_path / "parts") == whole[0]
    assert not (tmp_path / "parts" / "locate").exists()

    status, out, _ = surgery("locate", folder, *ASKED, "--out", "parts", "--resume")
    assert (status, counts) == (0, whole[1])  # nothing more
    assert "Accuracy of the base" in out


@pytest.mark.usefixtures("in_float64")
def test_what_processes_hand_each_other_keeps_its_bits():
    for dtype in (torch.float16, torch.float64):
        sent = torch.tensor([1.5, -2.25]).to(dtype)
        assert torch.equal(pickle.loads(pickle.dumps(sent)), sent)
    narrow = torch.from_numpy(np.array([1.5, -2.25], np.float32))
    received = pickle.loads(pickle.dumps(narrow))
    assert received.dtype == narrow.dtype
    assert torch.equal(received, narrow)
