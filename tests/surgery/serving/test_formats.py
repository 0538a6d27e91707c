"""Layer grafts for engines: a NemotronH of transformers' own, and files for llama.cpp where its sources are."""

import math
import os

import pytest
import torch
from transformers import AutoModelForCausalLM

import surgery
from surgery.errors import UserError
from surgery.records.plan import Plan
from surgery.serving import gguf
from surgery.serving.nemotron_h import export_nemotron_h
from tests.surgery.exporting.folders import hybrid_of, make_tokenizer, write_base
from tests.surgery.modeling.bases import make_base

LAYERS = Plan(kind="layer", sites=("L1",), width=8)
HEADS = Plan(sites=("L0.H1",))


def test_grafts_at_heads_are_refused(tmp_path):
    hybrid, tokenizer = hybrid_of(write_base(tmp_path / "base"), HEADS)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="L0"):
        gguf.export_gguf(hybrid, tokenizer, tmp_path / "out")


@pytest.mark.parametrize(
    "change", [{"use_bias": True}, {"use_conv_bias": False}, {"time_step_limit": (0.1, math.inf)}, {"hidden_act": "relu"}]
)
def test_what_llama_cpp_cannot_compute_is_refused(change):
    assert gguf.why_not(make_base("mamba2").config) is None
    assert gguf.why_not(make_base("mamba2", **change).config)


def test_without_llama_cpp_it_is_said_where_its_sources_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    with pytest.raises(UserError, match="LLAMA_CPP"):
        gguf.export_gguf(make_base("mamba2", dtype=torch.float32), make_tokenizer(), tmp_path)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with pytest.raises(UserError, match="conversion"):
        gguf.source()


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no sources of llama.cpp")
@pytest.mark.parametrize("what", ["base", "layers"])
def test_a_gguf_holds_the_tensors(tmp_path, what):
    model, tokenizer = surgery.load("checkpoints/tiny-mamba2")
    hybrid = surgery.splice(model, Plan(kind="layer", sites=("L2",), width=32)) if what == "layers" else model
    gguf.export_gguf(hybrid, tokenizer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [gguf.FILE]


@pytest.fixture(scope="module")
def base():
    return surgery.load("checkpoints/tiny-mamba2")


@pytest.mark.parametrize("layers", [("L2",), ("L0", "L3")])
def test_same_logits_and_tokens(base, layers, tmp_path):
    model, tokenizer = base
    hybrid = surgery.splice(model, Plan(kind="layer", sites=layers, width=32)).eval()
    export_nemotron_h(hybrid, tokenizer, tmp_path)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    ids = torch.randint(3, 90, (2, 37), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = hybrid.double()(input_ids=ids, use_cache=False).logits
        assert (other(input_ids=ids, use_cache=False).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    greedy = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(other.generate(ids, **greedy), hybrid.generate(ids, **greedy))


def test_refuses_heads(base, tmp_path):
    model, tokenizer = base
    hybrid = surgery.splice(model, Plan(sites=("L2.H1",)))
    with pytest.raises(UserError, match=r"L2.*plan\.kind=layer"):
        export_nemotron_h(hybrid, tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())
