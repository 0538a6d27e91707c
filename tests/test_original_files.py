"""The files of original state-spaces folders: shards and their index, and how much memory reading them takes."""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from surgery.serving.readers.mamba_ssm import load_folder
from tests.test_original import MAMBA1, Evil, becomes, refused, state_of, write
from tests.test_original import stock as stock_of

TINY = MAMBA1.tiny
KINDS = {"bin": "pytorch_model.bin", "safetensors": "model.safetensors"}
WIDE = {**TINY, "d_model": 64, "n_layer": 8, "vocab_size": 512}  # 1.3 MB, the embedding being the largest tensor
EMBEDDING, HEAD = "backbone.embedding.weight", "lm_head.weight"


def stock(dtype=torch.float32, **fields):
    return stock_of(MAMBA1, dtype, **fields)


def wide(dtype=torch.float32):
    return stock(dtype, hidden_size=64, num_hidden_layers=8, vocab_size=512)


def shard(folder, config, state, kind="bin", shards=3):
    """Write the weights dealt out over several files, and their index. Return the config."""
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "safetensors":  # it refuses shared memory
        state = {name: tensor.clone() for name, tensor in state.items()}
    stem, suffix = KINDS[kind].rsplit(".", 1)
    names = [f"{stem}-{i + 1:05}-of-{shards:05}.{suffix}" for i in range(shards)]
    weight_map = {name: names[i % shards] for i, name in enumerate(state)}
    for file in names:
        part = {name: state[name] for name in state if weight_map[name] == file}
        torch.save(part, folder / file) if kind == "bin" else save_file(part, folder / file)
    (folder / f"{KINDS[kind]}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return config


def index_of(folder, kind="bin"):
    path = folder / f"{KINDS[kind]}.index.json"
    return path, json.loads(path.read_text())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_shards_are_the_same_model(tmp_path, tied, dtype, kind):
    base = stock(dtype, tie_word_embeddings=tied)
    becomes(tmp_path, shard(tmp_path, {**TINY, "tie_embeddings": tied}, state_of(base), kind), base)


def test_order_of_preference(tmp_path):
    """model.safetensors, its shards, pytorch_model.bin, its shards: as in transformers."""
    state = state_of(stock())

    def marked(value):
        return {**state, "backbone.norm_f.weight": torch.full((20,), value)}

    def loaded():
        return load_folder(tmp_path, TINY).backbone.norm_f.weight[0].item()

    shard(tmp_path, TINY, marked(4.0), "bin")
    assert loaded() == 4.0
    write(tmp_path, TINY, marked(3.0), "bin")
    assert loaded() == 3.0
    shard(tmp_path, TINY, marked(2.0), "safetensors")
    assert loaded() == 2.0
    write(tmp_path, TINY, marked(1.0), "safetensors")
    assert loaded() == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_that_disagrees_with_its_shards(tmp_path, kind):
    shard(tmp_path, TINY, state_of(stock()), kind)
    path, index = index_of(tmp_path, kind)
    first, other = sorted(set(index["weight_map"].values()))[:2]
    name = next(name for name, file in index["weight_map"].items() if file == first)

    def with_map(change):
        path.write_text(json.dumps({"weight_map": {**index["weight_map"], **change}}))

    with_map({name: other})
    refused(tmp_path, TINY, str(path), name, "unexpected", first)
    with_map({"no.such.tensor": other})
    refused(tmp_path, TINY, str(path), "no.such.tensor", "missing", other)
    path.write_text(json.dumps({"weight_map": {k: v for k, v in index["weight_map"].items() if k != name}}))
    refused(tmp_path, TINY, str(path), name, "unexpected", first)


def test_an_index_that_leads_elsewhere(tmp_path):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    shard(folder, TINY, state_of(stock()))
    for trap in (tmp_path / "x.bin", folder / "sub" / "x.bin", folder / "x.safetensors"):
        torch.save({"backbone.norm_f.weight": torch.ones(20)}, trap)
    path, index = index_of(folder)
    for where in ("../x.bin", "/etc/x.bin", "sub/x.bin", "..", ".", "", "x.safetensors", "x.bin/", "a\0.bin"):
        index["weight_map"]["backbone.norm_f.weight"] = where
        path.write_text(json.dumps(index))
        refused(folder, TINY, str(path), repr(where))


def test_an_index_of_safetensors_leads_to_no_pickle(tmp_path):
    shard(tmp_path, TINY, state_of(stock()), "safetensors")
    write(tmp_path, TINY, state_of(stock()), "bin")
    path, index = index_of(tmp_path, "safetensors")
    path.write_text(json.dumps({"weight_map": dict.fromkeys(index["weight_map"], "pytorch_model.bin")}))
    refused(tmp_path, TINY, str(path), "pytorch_model.bin", ".safetensors")


def test_an_index_that_is_none(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    for content in ("", "{", "[]", "{}", "null", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000, "\ud800"):
        path.write_bytes(content.encode(errors="surrogatepass"))
        refused(tmp_path, TINY, "cannot read", str(path), "weight_map")
    path.write_text('{"weight_map": {}}')
    refused(tmp_path, TINY, EMBEDDING, "missing")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_and_missing_shards(tmp_path, kind):
    shard(tmp_path, TINY, state_of(stock()), kind)
    (second,) = tmp_path.glob("*-00002-of-*")
    if kind == "bin":
        torch.save({**torch.load(second), "evil": Evil(tmp_path / "marker")}, second)
        refused(tmp_path, TINY, str(second), "more than tensors")
        assert not (tmp_path / "marker").exists()
    second.write_bytes(second.read_bytes()[:100])
    refused(tmp_path, TINY, str(second), "cannot read")
    second.unlink()
    refused(tmp_path, TINY, str(index_of(tmp_path, kind)[0]), second.name, "missing")


def test_heads_in_two_shards_must_agree_when_tied(tmp_path):
    state = {name: tensor.clone() for name, tensor in state_of(stock()).items()}
    shard(tmp_path, TINY, state)
    holders = index_of(tmp_path)[1]["weight_map"]
    assert holders[EMBEDDING] != holders[HEAD]
    model = load_folder(tmp_path, TINY)
    assert model.lm_head.weight is model.backbone.embeddings.weight
    refused(tmp_path, shard(tmp_path, TINY, {**state, HEAD: state[HEAD] + 1}), HEAD, "tie_embeddings")


# Memory


def write_form(folder, form, state):
    """Write WIDE in one of the forms of FORMS, return the bytes of its weights' files."""
    if form.endswith(" shards"):
        shard(folder, WIDE, state, form.removesuffix(" shards"))
    else:
        write(folder, WIDE, state, form)
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".bin", ".safetensors"))


FORMS = [*KINDS, *(f"{kind} shards" for kind in KINDS)]
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has /proc/self/maps")


def mappings(folder):
    """The address ranges of this process that are mapped from a folder's files."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            start, end = line.split()[0].split("-")
            yield int(start, 16), int(end, 16)


def peak_bytes(folder, dtype):
    """The most bytes of tensors that live at one time while the folder is loaded. A mapped file counts in full."""
    gc.collect()  # else the memory of an earlier model may be freed, and subtracted, meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        load_folder(folder, WIDE, dtype)
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@on_linux
@pytest.mark.parametrize("form", FORMS)
def test_tensors_are_mapped_from_their_file_which_stays_as_it_is(tmp_path, form):
    write_form(tmp_path, form, state_of(wide(torch.bfloat16)))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    model = load_folder(tmp_path, WIDE)
    ranges = list(mappings(tmp_path))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        for name, p in model.named_parameters():
            assert any(start <= p.data_ptr() and p.data_ptr() + p.nbytes <= end for start, end in ranges), name
            p.zero_()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("form", FORMS)
def test_conversion_while_loading(tmp_path, form):
    size = write_form(tmp_path, form, state_of(wide()))
    model = load_folder(tmp_path, WIDE, torch.bfloat16)
    assert model.config.dtype == torch.bfloat16
    assert model.lm_head.weight is model.backbone.embeddings.weight
    converted = wide().to(torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, converted[name]) for name, tensor in model.state_dict().items())
    # The mapped file, and the one copy that stays. The tied embedding is not converted twice.
    copy, twice = sum(p.nbytes for p in model.parameters()), model.lm_head.weight.nbytes
    assert peak_bytes(tmp_path, torch.bfloat16) < size + copy + twice / 2
    if sys.platform.startswith("linux"):
        assert not list(mappings(tmp_path))  # nothing holds on to the file


def test_conversion_of_a_file_that_cannot_be_mapped(tmp_path):
    size = write_form(tmp_path, "bin", state_of(wide()))
    torch.save(state_of(wide()), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    largest = max(p.nbytes for p in wide().parameters())
    assert peak_bytes(tmp_path, torch.bfloat16) < size + largest  # two copies would be half as much again
    assert largest < size / 8


def test_conversion_upwards_and_of_mixed_files(tmp_path):
    state = state_of(stock(torch.bfloat16))
    state["backbone.layers.0.mixer.D"] = torch.full((40,), 1 / 3)
    config = write(tmp_path, TINY, state)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        loaded = state_of(load_folder(tmp_path, config, dtype))
        assert all(torch.equal(loaded[name], tensor.to(dtype)) for name, tensor in state.items())


def test_conversion_of_shared_untied_weights(tmp_path):
    config = write(tmp_path, {**TINY, "tie_embeddings": False}, state_of(stock()))
    for dtype in (None, torch.bfloat16):
        model = load_folder(tmp_path, config, dtype)
        assert model.lm_head.weight.data_ptr() != model.backbone.embeddings.weight.data_ptr()
        assert torch.equal(model.lm_head.weight, model.backbone.embeddings.weight)
