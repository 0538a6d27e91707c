"""Files for other programs: mamba_ssm's folder, and llama.cpp's where its sources are."""

import math
import os

import pytest
import torch

import surgery
from surgery.errors import UserError
from surgery.records.plan import Plan
from surgery.serving import gguf
from surgery.serving.mamba_ssm import export_mamba_ssm
from tests.surgery.exporting.folders import hybrid_of, make_tokenizer, write_base
from tests.surgery.modeling.bases import make_base, make_rows

LAYERS = Plan(kind="layer", sites=("L1",), width=8)
HEADS = Plan(sites=("L0.H1",))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["mamba2", "mamba"])
def test_the_folder_of_mamba_ssm_is_read_back_bit_for_bit(tmp_path, name, tied):
    base = make_base(name, dtype=torch.float32, tie_word_embeddings=tied)
    hybrid = surgery.splice(base, LAYERS).eval()
    export_mamba_ssm(hybrid, make_tokenizer(), tmp_path)
    again, _ = surgery.load(tmp_path)
    assert type(again) is type(hybrid)
    ids = make_rows()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, hybrid(ids).logits)
    assert again.generation_config.to_dict() == hybrid.generation_config.to_dict()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=True)  # it holds tensors only


@pytest.mark.parametrize("change", [{"layer_norm_epsilon": 1e-4}, {"time_step_limit": (0.0, 1.0)}, {"hidden_act": "gelu"}])
def test_what_mamba_ssm_cannot_say_is_refused(tmp_path, change):
    hybrid = surgery.splice(make_base("mamba2", dtype=torch.float32, **change), LAYERS)
    with pytest.raises(UserError, match=next(iter(change))):
        export_mamba_ssm(hybrid, make_tokenizer(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [export_mamba_ssm, gguf.export_gguf])
def test_grafts_at_heads_are_refused(tmp_path, write):
    hybrid, tokenizer = hybrid_of(write_base(tmp_path / "base"), HEADS)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="L0"):
        write(hybrid, tokenizer, tmp_path / "out")


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
