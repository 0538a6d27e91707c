"""Files for other programs, and what engines compute of them where they are installed."""

import math
import os
from pathlib import Path

import pytest
import torch

import surgery
from surgery.checking.engines import compare_engine
from surgery.errors import UserError
from surgery.records.plan import Plan, Start
from surgery.serving import gguf, vllm_limits
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


@pytest.mark.parametrize("null", [None, 0.5])
def test_what_vllm_serves_and_refuses(tmp_path, null):
    starts = {"L0.H1": Start(sign=1, tau=1.0, null=null)}
    config = surgery.splice(make_base("mamba2"), Plan(sites=("L0.H1",), starts=starts)).config
    assert vllm_limits.why_not(config) is None
    graft = config.grafts[0]
    assert vllm_limits.columns(config, graft) == config.head_dim + graft["time_step"] + (null is not None)
    assert vllm_limits.head_size(config) >= max(graft["width"], vllm_limits.columns(config, graft))
    assert "nemotron_h" in vllm_limits.why_not(surgery.splice(make_base("mamba2"), LAYERS).config)
    assert vllm_limits.why_not(surgery.splice(make_base("mamba"), HEADS).config)
    bounded = make_base("mamba2", time_step_limit=(0.0, 1.0))
    assert "time step" in vllm_limits.why_not(surgery.splice(bounded, HEADS).config)


ENGINE = os.environ.get("SURGERY_VLLM")  # the Python of an environment with vLLM and this package


@pytest.mark.skipif(ENGINE is None, reason="SURGERY_VLLM names no Python that has vLLM")
@pytest.mark.parametrize(("null", "closed"), [(None, 0.0), (0.6, 0.0), (0.6, 0.02)])
def test_vllm_computes_grafts_at_heads(tmp_path, monkeypatch, null, closed):
    monkeypatch.setattr("surgery.checking.engines.LENGTHS", (1, 24, 190, 7, 100))
    model, tokenizer = surgery.load("checkpoints/tiny-mamba2", dtype="float32")
    sites = {"L0.H1": 1, "L2.H3": -1, "L2.H5": -1}
    starts = {site: Start(sign=sign, tau=1.1, null=null) for site, sign in sites.items()}
    plan = Plan(sites=("L0.H1", "L2.H3,5"), starts=starts, gate=0.8, closed_below=closed)
    hybrid = surgery.splice(model, plan).eval()
    hybrid.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    assert compare_engine(hybrid, tmp_path, "vllm", Path(str(ENGINE))).holds
