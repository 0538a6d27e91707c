"""Original folders with attention layers (mamba2attn): against loops in float64, and against themselves."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import surgery
from surgery.errors import UserError
from surgery.families.mamba import MambaHybridForCausalLM
from surgery.families.mamba2 import Mamba2HybridForCausalLM
from surgery.models.anatomy import anatomy
from surgery.serving.original_config import original_config
from surgery.serving.readers.mamba_ssm import load_folder
from surgery.world.tokenizer import build_tokenizer
from tests.test_original import (
    GENERATIONS,
    IDS,
    REAL2,
    agrees,
    reference_logits,
    refused,
    refused_config,
    state_of,
    stock,
    write,
)

# The whole config.json of state-spaces/mamba2attn-2.7b.
REAL = {
    **REAL2, "d_model": 2560, "n_layer": 64, "attn_layer_idx": [9, 18, 27, 36, 45, 56],
    "attn_cfg": {
        "causal": True, "d_conv": 4, "head_dim": 128, "num_heads": 30, "out_proj_bias": False, "qkv_proj_bias": False,
        "rotary_emb_dim": 64,
    },
}  # fmt: skip
# Two heads of 12 on a width of 16 or 20, which they do not divide, as 30 heads of 128 do not divide 2560.
ATTN = {**REAL["attn_cfg"], "head_dim": 12, "num_heads": 2, "rotary_emb_dim": 6}
CLASSES = {"Mamba1": MambaHybridForCausalLM, "Mamba2": Mamba2HybridForCausalLM}
VARIANTS = {
    "as published": {},
    "no convolution": {"d_conv": 0},
    "no positions": {"rotary_emb_dim": 0},
    "all dimensions turn, another base": {"rotary_emb_dim": 12, "rotary_emb_base": 100.0},
    "four heads in two groups": {"num_heads": 4, "num_heads_kv": 2},
    "biases": {"qkv_proj_bias": True, "out_proj_bias": True},
    "head_dim from d_model": {"head_dim": None, "rotary_emb_dim": 2},
    "softmax_scale": {"softmax_scale": 0.5},
}


def folder_of(layer, *, layers=3, where=(1,), **attn):
    """The config of a small folder and random tensors for it, made without the code under test."""
    of = GENERATIONS[layer]
    given = {name: value for name, value in {**ATTN, **attn}.items() if value is not None}
    config = {**of.tiny, "n_layer": layers, "attn_layer_idx": list(where), "attn_cfg": given}
    state = {name: tensor.clone() for name, tensor in state_of(stock(of, num_hidden_layers=layers)).items()}
    state["lm_head.weight"] = state["backbone.embedding.weight"]
    heads, width = given["num_heads"], config["d_model"]
    dim = given.get("head_dim", width // heads)
    rows = dim * (heads + 2 * given.get("num_heads_kv", heads))
    shapes = {"in_proj.weight": (rows, width), "out_proj.weight": (width, heads * dim)}
    if given["d_conv"]:
        shapes |= {"conv1d.weight": (rows, 1, given["d_conv"]), "conv1d.bias": (rows,)}
    if given["qkv_proj_bias"]:
        shapes |= {"in_proj.bias": (rows,), "out_proj.bias": (width,)}
    generator = torch.Generator().manual_seed(1)
    for i in where:
        for name in [name for name in state if f"layers.{i}.mixer." in name]:
            del state[name]
        state |= {
            f"backbone.layers.{i}.mixer.{name}": torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()
        }
    return config, state


def test_real_config():
    config = original_config(REAL)
    assert config.model_type == "mamba2_hybrid"
    assert [graft["layer"] for graft in config.grafts] == [9, 18, 27, 36, 45, 56]
    assert config.grafts[0] == {
        "kind": "layer", "layer": 9, "num_heads": 30, "num_key_value_heads": 30, "head_dim": 128, "scale": 128**-0.5,
        "rope": {"dim": 64, "theta": 10000.0}, "qk_norm": None, "conv": 4, "mlp": None, "bias": ["qkv_conv"],
    }  # fmt: skip
    assert (config.num_heads, config.head_dim, config.n_groups, config.vocab_size) == (80, 64, 1, 50288)
    with torch.device("meta"):
        sizes = {name: tuple(p.shape) for name, p in Mamba2HybridForCausalLM(config).named_parameters() if ".graft." in name}
    assert len(sizes) == 6 * 6
    assert sizes["backbone.layers.9.mixer.graft.q_proj.weight"] == (3840, 2560)
    assert sizes["backbone.layers.9.mixer.graft.qkv_conv.weight"] == (11520, 1, 4)


@pytest.mark.parametrize(("variant", "layer"), [("as published", "Mamba1"), *((variant, "Mamba2") for variant in VARIANTS)])
@torch.no_grad()
def test_logits_agree_with_the_loops(tmp_path, variant, layer):
    config, state = folder_of(layer, **VARIANTS[variant])
    assert type(agrees(tmp_path, config, state, GENERATIONS[layer].scan, bound=2e-4)) is CLASSES[layer]


@pytest.mark.parametrize("layer", GENERATIONS)
@torch.no_grad()
def test_several_attention_layers_token_by_token(tmp_path, layer):
    config, state = folder_of(layer, layers=4, where=(3, 0))
    model = load_folder(tmp_path, write(tmp_path, config, state))
    exact = reference_logits({n: t.double() for n, t in state.items()}, config, IDS, GENERATIONS[layer].scan)
    cache, pieces = None, []
    for piece in IDS.split([7, 1, 1, 10], dim=1):
        output = model(piece, cache_params=cache, use_cache=True)
        cache = output.cache_params
        pieces.append(output.logits)
    torch.testing.assert_close(torch.cat(pieces, 1).double(), exact, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
@torch.no_grad()
def test_it_is_mapped_and_survives_transformers_own_format(tmp_path, kind):
    """Queries, keys and values are views of one tensor of the file: nothing is copied, and nothing is saved twice."""
    config, state = folder_of("Mamba2")
    model = load_folder(tmp_path, write(tmp_path, config, state, kind))
    graft = model.backbone.layers[1].mixer.graft
    assert graft.k_proj.weight.data_ptr() == graft.q_proj.weight.data_ptr() + 4 * graft.q_proj.weight.numel()
    before = [file.read_bytes() for file in sorted(tmp_path.iterdir())]
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    assert {n: t.tolist() for n, t in again.state_dict().items()} == {n: t.tolist() for n, t in model.state_dict().items()}
    graft.q_proj.weight.zero_()
    assert [file.read_bytes() for file in sorted(tmp_path.iterdir()) if file.is_file()] == before


def test_surgery_load_knows_its_heads(tmp_path):
    config, state = folder_of("Mamba2", where=(1,))
    write(tmp_path, config, state)
    build_tokenizer().save_pretrained(tmp_path)
    loaded = surgery.load(tmp_path, dtype="bfloat16")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert anatomy(loaded.model).kinds() == "0 ssm, 1 attention, 2 ssm"
    assert loaded.model.generation_config.eos_token_id == 0


def test_special_tokens_of_a_folder_that_names_them(tmp_path):
    config, state = folder_of("Mamba2")
    write(tmp_path, config, state)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6], "pad_token_id": 3}))
    model = load_folder(tmp_path, config)
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (None, [5, 6], 3)
    assert model.generation_config.eos_token_id == [5, 6]
    (tmp_path / "generation_config.json").write_text("{")
    refused(tmp_path, config, "generation_config.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attn_layer_idx": 9}, ("attn_layer_idx", "9")),
        ({"attn_layer_idx": [64]}, ("attn_layer_idx", "63")),
        ({"attn_layer_idx": [-1]}, ("attn_layer_idx",)),
        ({"attn_layer_idx": [9, 9]}, ("attn_layer_idx", "different")),
        ({"attn_layer_idx": [True]}, ("attn_layer_idx", "True")),
        ({"attn_cfg": [1]}, ("attn_cfg", "object")),
        ({"attn_cfg": {}}, ("attn_cfg.causal", "False")),  # mamba_ssm's own default
        ({"d_intermediate": 8192}, ("d_intermediate", "8192")),  # transformerpp-2.7b
    ],
)
def test_refused_fields(change, words):
    refused_config({**REAL, **change}, *words)


BAD = [
    ("causal", None), ("num_heads", None), ("num_heads", 0), ("num_heads_kv", 7), ("head_dim", "128"), ("mlp_dim", 256),
    ("qkv_proj_bias", 0), ("out_proj_bias", "no"), ("softmax_scale", 0), ("d_conv", -1), ("rotary_emb_dim", 63),
    ("rotary_emb_dim", 130), ("rotary_emb_base", float("inf")), ("rotary_emb_interleaved", True), ("window_size", 128),
]  # fmt: skip


def test_refused_fields_of_attn_cfg():
    for name, value in BAD:
        with pytest.raises(UserError, match=rf"^config\.json: attn_cfg\.{name} [^\n]+$"):
            original_config({**REAL, "attn_cfg": {**REAL["attn_cfg"], name: value}})
    bare = {name: value for name, value in REAL["attn_cfg"].items() if name != "head_dim"}
    with pytest.raises(UserError, match=r"attn_cfg\.num_heads 30 does not divide d_model, 2560"):
        original_config({**REAL, "attn_cfg": bare})


def test_refused_tensors(tmp_path):
    config, state = folder_of("Mamba2")
    whole, conv = "backbone.layers.1.mixer.in_proj.weight", "backbone.layers.1.mixer.conv1d.bias"
    for changed, words in (
        ({k: v for k, v in state.items() if k != whole}, (whole, "missing")),
        ({k: v for k, v in state.items() if k != conv}, (conv, "missing")),
        ({**state, whole: state[whole][:-1].clone()}, (whole, "(71, 16)", "(72, 16)")),
        ({**state, "backbone.layers.1.mixer.in_proj.bias": torch.ones(72)}, ("in_proj.bias", "unexpected")),
        ({**state, "backbone.layers.1.mixer.D": torch.ones(4)}, ("mixer.D", "unexpected")),
    ):
        refused(tmp_path, write(tmp_path, config, changed), *words)
