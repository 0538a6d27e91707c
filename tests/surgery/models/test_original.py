"""Folders in mamba_ssm's layout: the same function in transformers' classes, and whatever is not understood is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import surgery.modeling  # noqa: F401  (registers the hybrids)
from surgery.errors import UserError
from surgery.look import _what_can_be_edited
from surgery.models import original
from surgery.models.load import open_folder
from surgery.planning.calibrate import calibrate
from surgery.records.plan import Plan
from surgery.splicing.splice import adopt
from surgery.tuning.controls import control_plan

MAMBA1: dict[str, Any] = {"d_model": 24, "n_layer": 2, "vocab_size": 37, "ssm_cfg": {"d_state": 6, "dt_rank": 3}}
SSD = {"layer": "Mamba2", "headdim": 8, "d_state": 8, "ngroups": 2, "chunk_size": 16}
MAMBA2: dict[str, Any] = {"d_model": 24, "n_layer": 3, "vocab_size": 37, "ssm_cfg": SSD, "tie_embeddings": False}
MHA = {
    "causal": True,
    "num_heads": 4,
    "num_heads_kv": 2,
    "head_dim": 8,
    "rotary_emb_dim": 4,
    "d_conv": 4,
    "qkv_proj_bias": False,
}
WITH_ATTENTION = MAMBA2 | {"attn_layer_idx": [1], "attn_cfg": MHA}
CASES = {"mamba": MAMBA1, "mamba2": MAMBA2, "with attention": WITH_ATTENTION}


def make(content: dict[str, Any], folder: Path, how: str = "pickle") -> Any:
    """Write a random model in the original layout; returns the live one."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(original.make_config(content)).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.3).abs_() if "norm" in name else parameter.data.normal_(std=0.3)
    state: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        other = re.sub(r"\.graft\.(\w+)\.", lambda match: f".{original.MHA[match[1]]}.", name).replace(
            "embeddings.", "embedding."
        )
        state[other] = torch.cat([state[other], tensor]) if other in state else tensor.clone()
    if how == "pickle":
        torch.save(state, folder / "pytorch_model.bin")
    elif how == "safetensors":
        if model.config.tie_word_embeddings:
            del state[original.HEAD]  # as its writers do
        save_file(state, folder / "model.safetensors")
    else:
        shards = {"a.bin": dict(list(state.items())[:5]), "b.bin": dict(list(state.items())[5:])}
        for shard, part in shards.items():
            torch.save(part, folder / shard)
        weight_map = {name: shard for shard, part in shards.items() for name in part}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["pickle", "safetensors", "shards"])
def test_it_computes_the_same(case: str, how: str, tmp_path: Path) -> None:
    live, ids = make(CASES[case], tmp_path, how), torch.randint(1, 37, (2, 19))
    read = original.read(tmp_path, CASES[case])
    assert read.config.vocab_size == 40
    assert torch.equal(read(ids, use_cache=False).logits, live(ids, use_cache=False).logits)
    half = original.read(tmp_path, CASES[case], torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_attention_layers_belong_to_the_base(tmp_path: Path) -> None:
    make(WITH_ATTENTION, tmp_path)
    model = adopt(original.read(tmp_path, WITH_ATTENTION))
    assert not model.graft_parameters()
    with model.disable_grafts():
        model(torch.ones(1, 5, dtype=torch.long))
    base, plan = open_folder(tmp_path, None, "cpu", False, False), Plan(sites="L2.H1", gate=0.5)
    assert _what_can_be_edited(base) == ((0, 2), 6, "")
    assert calibrate(base, plan, torch.arange(64).view(2, 32) % 37, 0.1).starts["L2.H1"].null is not None
    assert {control_plan("random_site", base, plan, seed).sites[0].layer for seed in range(4)} == {0}


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"strange": 1}, "strange"),
        ({"rms_norm": False}, "rms_norm"),
        ({"d_intermediate": 64}, "d_intermediate"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "ssm_cfg"),
        ({"ssm_cfg": SSD | {"D_has_hdim": True}}, "D_has_hdim"),
        ({"ssm_cfg": SSD | {"headdim": 7}}, "headdim"),
        ({"attn_layer_idx": [9], "attn_cfg": MHA}, "attn_layer_idx"),
        ({"attn_layer_idx": [1], "attn_cfg": {"num_heads": 4}}, "causal"),
        ({"attn_layer_idx": [1], "attn_cfg": MHA | {"mlp_dim": 64}}, "mlp_dim"),
        ({"attn_layer_idx": [1], "attn_cfg": MHA | {"rotary_emb_interleaved": True}}, "interleaved"),
    ],
)
def test_fields_that_could_change_the_function_are_refused(more: dict, word: str) -> None:
    with pytest.raises(UserError, match=word):
        original.make_config(MAMBA2 | more)


def test_fields_that_say_nothing_are_taken() -> None:
    config = original.make_config(MAMBA2 | {"strange": None, "torch_dtype": "float32", "attn_cfg": {}, "fused_add_norm": False})
    assert config.hidden_size == 24


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    make(MAMBA2, tmp_path)
    weights = torch.load(tmp_path / "pytorch_model.bin")
    one = "backbone.layers.1.mixer.D"
    for wrong in ({"x": torch.ones(1)}, {one: torch.ones(5)}, {one: torch.ones(6, dtype=torch.int32)}, {one: "text"}):
        torch.save(weights | wrong, tmp_path / "pytorch_model.bin")
        with pytest.raises(UserError, match=r"x|mixer\.D|pytorch_model"):
            original.read(tmp_path, MAMBA2)
    del weights[one]
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"mixer\.D"):
        original.read(tmp_path, MAMBA2)
