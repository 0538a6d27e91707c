"""Every recipe for a published model does its whole job, on random weights in that model's published configuration: with fewer
layers and, beside the slow tests, narrower. Options, layouts and dtypes are the published ones; the recipe is the file in
recipes/, shortened by --set.
"""

import json
import os
import re
import shutil

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from surgery import adopt, load
from surgery.loading.hub import local_folder
from surgery.records.recipe import read_recipe
from tests.models import ROOT, but_slow
from tests.published_models import tokenizer
from tools import random_weights
from tools.published import DEPTH, cut, is_original, names, published

RECIPES = ROOT / "recipes"
# The kind of tokenizer that each brings, or uses.
WORDS = {
    "codestral-mamba-7b": "Llama 2", "falcon-mamba-7b": "GPT-NeoX", "llama-3.1-8b": "Llama 3", "llamba-8b": "Llama 3",
    "mamba-130m": "GPT-NeoX", "mamba-2.8b": "GPT-NeoX", "mamba2-130m": "GPT-NeoX", "mamba2-2.7b": "GPT-NeoX",
    "zamba2-7b": "Llama 2",
}  # fmt: skip
LOCATED = ("llama-3.1-8b", "zamba2-7b")  # and no more
# Fewer of everything. Of few layers and channels, a recipe's share of heads can be less than one.
FEW = [
    "locate.examples=2", "locate.options.pairs=4", "tune.steps=1", "tune.batch_size=2", "tune.text_batch_size=2",
    "tune.gradient_accumulation_steps=2", "tune.text_tokens=24", "tune.skill_batch_size=2", "bench.limit=2",
    "bench.pairs=[4]", "bench.windows=1", "bench.window=32", "bench.contexts=[16]",
]  # fmt: skip


def settings(*values: str) -> list[str]:
    return [part for value in values for part in ("--set", value)]


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    """Folder of a tokenizer, by the model."""
    place = tmp_path_factory.mktemp("words")

    def of(name: str):
        folder = place / WORDS[name].replace(" ", "-")
        if not folder.exists():
            tokenizer(WORDS[name]).save_pretrained(folder)
        return folder

    return of


@pytest.fixture
def write(words, tmp_path):
    """Random weights of a published model, of a few layers: its folder, and the settings that name its parts."""

    def written(name: str, layers: int, narrow: bool):
        model, known = published(name), words(name)
        vocabulary = len(AutoTokenizer.from_pretrained(known)) + 5
        config = cut(model.config, layers, vocabulary, narrow)
        random_weights.write(config, tmp_path / name, dtype=model.stored, tokenizer=known)
        return tmp_path / name, [f"tokenizer={random_weights.tokenizer_in(tmp_path / name)}"]

    return written


def run(surgery, write, tmp_path, name, layers, *more, narrow=True):
    """Run, or locate, as the head of the recipe's file says; the output folder."""
    folder, own = write(name, layers, narrow)
    for text in ("train", "held_out"):
        (tmp_path / f"{text}.txt").write_text(f"The {text} text is another one. " * 40)
    recipe = RECIPES / f"{name}.yaml"
    if name in LOCATED:
        few = [setting for setting in FEW if setting.startswith("locate")]
        called = ("locate", folder, "--recipe", recipe, "--out", "out", *settings(*own, *few, *more))
    else:
        called = ("run", recipe, "--anyway", "--out", "out", *settings(f"model={folder}", *own, *FEW, *more))
    status, out, err = surgery(*called)
    assert status == 0, err
    return tmp_path / "out", out


def test_every_recipe_for_a_published_model_has_its_configuration_and_its_command():
    kept = {path.stem for path in RECIPES.glob("*.yaml") if yaml.safe_load(path.read_text()).get("model", "").count("/") == 1}
    real = {name for name in kept if not read_recipe(RECIPES / f"{name}.yaml").model.startswith(("checkpoints/", "runs/"))}
    assert real == set(names()) == set(WORDS)
    for name in names():
        model, recipe = published(name), read_recipe(RECIPES / f"{name}.yaml")
        assert recipe.model == model.repository
        verb = f"surgery locate {model.repository} --recipe" if name in LOCATED else "surgery run"
        assert f"{verb} recipes/{name}.yaml" in (RECIPES / f"{name}.yaml").read_text().splitlines()[0]


@pytest.mark.slow  # test_locating_alone is quicker, and test_cli.py has whole runs
@pytest.mark.parametrize("name", [name for name in names() if name not in LOCATED])
def test_the_whole_run(surgery, write, tmp_path, name):
    # Shares and numbers of heads are of the whole depth and width. Controls are of the same parts.
    fewer = ["locate.exact=0.1"] if read_recipe(RECIPES / f"{name}.yaml").locate.exact not in (None, 0, 1) else []
    done, _ = run(surgery, write, tmp_path, name, 2, *fewer, "bench.controls=false", "plan.heads=2")
    hybrid = load(done / "hybrid")
    written = read_recipe(RECIPES / f"{name}.yaml").dtype
    assert {str(p.dtype) for n, p in hybrid.model.named_parameters() if ".graft." not in n} == {f"torch.{written}"}
    assert sum(len(site.heads) for site in hybrid.model.surgery.plan.sites) == 2
    report = json.loads((done / "report.json").read_text())
    assert report["models"]["tuned"]["kv"]["4"]["n"] == 2


@pytest.mark.parametrize("name", but_slow(LOCATED, "llama-3.1-8b"))
def test_locating_alone(surgery, write, tmp_path, name):
    done, _ = run(surgery, write, tmp_path, name, 2, "locate.exact=0.05")
    ranking = json.loads((done / "ranking.json").read_text())
    kinds = {head["kind"] for head in ranking["heads"]}
    assert kinds == ({"ssm", "attention"} if name == "zamba2-7b" else {"attention"})
    assert any(head["ablation_loss"] for head in ranking["heads"])


@pytest.mark.slow
@pytest.mark.skipif(
    "SURGERY_ALL_PUBLISHED" not in os.environ, reason="SURGERY_ALL_PUBLISHED is not set: it takes the better part of an hour"
)
@pytest.mark.parametrize("name", names())
def test_the_published_widths(surgery, write, tmp_path, name):
    """All widths and options as published; layers and vocabulary are cut, and the shares are the recipe's."""
    layers = {"llamba-8b": 1, "llama-3.1-8b": 1}.get(name, 2)
    few = [] if name in LOCATED else ["bench.controls=false"]
    done, _ = run(surgery, write, tmp_path, name, layers, *few, narrow=False)
    ranking = json.loads((done / "ranking.json").read_text())
    assert len({head["site"].partition(".")[0] for head in ranking["heads"]}) == layers


@pytest.mark.parametrize("name", ["falcon-mamba-7b", "mamba2-2.7b", "zamba2-7b"])
def test_random_weights_have_the_published_shape(tmp_path, words, name):
    """What is cut is sizes alone, and a folder in shards is the model of one file."""
    model, known = published(name), words(name)
    small = cut(model.config, 2, 700, narrow=True)
    assert {*small} == {*model.config}
    sizes = {*DEPTH, "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "hybrid_layer_ids", "layers_block_type"}
    options = {field for field, value in model.config.items() if isinstance(value, bool | str | float | type(None))}
    assert all(small[field] == model.config[field] for field in options - sizes)
    folders = [tmp_path / "one", tmp_path / "shards"]
    for folder, shard in zip(folders, ("1GB", "40KB"), strict=True):
        size = random_weights.write(small, folder, dtype="float32", tokenizer=known, shard=shard)
        suffix = "bin" if is_original(small) else "safetensors"
        files = [*folder.glob(f"*.{suffix}")]
        assert (len(files) > 1) == (shard == "40KB")
        assert size <= sum(file.stat().st_size for file in files) < size + 60_000
    one, shards = (load(folder, tokenizer=str(random_weights.tokenizer_in(folder))).model for folder in folders)
    assert all(torch.equal(mine, yours) for mine, yours in zip(one.parameters(), shards.parameters(), strict=True))
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("original", [False, True], ids=["transformers", "original"])
def test_activations_stay_finite_through_64_layers(tmp_path, words, original):
    name = "mamba2-2.7b" if original else "falcon-mamba-7b"
    config = cut(published(name).config, 64, 700, narrow=True)
    random_weights.write(config, tmp_path / "deep", dtype="bfloat16", tokenizer=words(name))
    deep = load(tmp_path / "deep", tokenizer=str(random_weights.tokenizer_in(tmp_path / "deep"))).model
    states = adopt(deep)(input_ids=torch.arange(24)[None], output_hidden_states=True).hidden_states
    assert torch.isfinite(states[-1]).all()
    assert states[-2].std() < 50 * states[1].std()


def test_the_tokenizer_is_filled_up_to_the_vocabulary():
    words = random_weights.tokenizer_of(None, 9000)
    assert len(words) == 9000
    text = "The value of the key 'anchor' is 31"
    ids = words(text)["input_ids"]
    assert words.decode(ids) == text
    assert not [token for token in words.convert_ids_to_tokens(ids) if re.match("<unused", token)]


def test_weights_that_a_repository_holds_twice_are_fetched_once(monkeypatch, tmp_path):
    """Codestral-Mamba's and Llama's hold them in their makers' layout, too: another 15 GB."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    needed = ["config.json", "model-00001-of-00003.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    spare = ["consolidated.safetensors", "original/consolidated.00.pth", "original/params.json"]
    fetched = []

    def snapshot(_, *, revision, allow_patterns, ignore_patterns):
        items = [*needed, *spare]
        fetched.extend(filter_repo_objects(items, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return tmp_path

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert local_folder("mistralai/Mamba-Codestral-7B-v0.1") == tmp_path
    assert fetched == needed
