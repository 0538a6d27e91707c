"""Original state-spaces folders of Mamba-1 and Mamba-2, written here from random models: there is no network in the tests. A
folder becomes transformers' own model, which computes the paper's equations."""

import builtins
import json
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from surgery.errors import UserError
from surgery.loading.readers import reader_of
from surgery.serving.original_config import original_config
from surgery.serving.readers import mamba_ssm
from surgery.serving.readers.mamba_ssm import load_folder, reads

IDS = torch.arange(2 * 19).view(2, 19) * 7 % 41


def conv(x, w):
    """The causal convolution of a layer's tensors. (B, T, C) -> (B, T, C)"""
    taps = w["mixer.conv1d.weight"]
    past = F.pad(x.transpose(1, 2), (taps.shape[-1] - 1, 0))
    return F.silu(F.conv1d(past, taps, w.get("mixer.conv1d.bias"), groups=taps.shape[0])).transpose(1, 2)


def scan1(u, w, config):
    """Mamba-1 token by token from the original tensors of a layer (B, T, D) -> (B, T, D), after arXiv 2312.00752 (algorithm 2,
    figure 3) and mamba_ssm's layout: in_proj gives [x, z], x_proj gives [dt, B, C]."""
    n, rank = config["ssm_cfg"].get("d_state", 16), config["ssm_cfg"].get("dt_rank", "auto")
    rank = math.ceil(config["d_model"] / 16) if rank == "auto" else rank
    x, z = F.linear(u, w["mixer.in_proj.weight"], w.get("mixer.in_proj.bias")).chunk(2, dim=-1)
    x = conv(x, w)
    dt, b, c = F.linear(x, w["mixer.x_proj.weight"]).split([rank, n, n], dim=-1)
    dt = F.softplus(F.linear(dt, w["mixer.dt_proj.weight"], w["mixer.dt_proj.bias"]))
    a = -torch.exp(w["mixer.A_log"])
    memory, outputs = u.new_zeros(len(u), x.shape[-1], n), []
    for t in range(u.shape[1]):
        written = (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        memory = torch.exp(dt[:, t, :, None] * a) * memory + written
        outputs.append(torch.einsum("bcn,bn->bc", memory, c[:, t]) + w["mixer.D"] * x[:, t])
    y = torch.stack(outputs, 1) * F.silu(z)
    return F.linear(y, w["mixer.out_proj.weight"], w.get("mixer.out_proj.bias"))


def scan2(u, w, config):
    """Mamba-2 token by token from the original tensors of a layer (B, T, D) -> (B, T, D), written after the paper and
    mamba_ssm's layout: in_proj gives [z, x, B, C, dt]."""
    ssm = {"ngroups": 1, "dt_limit": (0.0, math.inf), **config["ssm_cfg"]}
    n, p, g = ssm["d_state"], ssm["headdim"], ssm["ngroups"]
    inner = 2 * config["d_model"]
    h = inner // p
    parts = [inner, inner + 2 * g * n, h]
    z, xbc, dt = F.linear(u, w["mixer.in_proj.weight"], w.get("mixer.in_proj.bias")).split(parts, dim=-1)
    x, b, c = conv(xbc, w).split([inner, g * n, g * n], dim=-1)
    x = x.unflatten(-1, (h, p))
    b, c = (t.unflatten(-1, (g, n)).repeat_interleave(h // g, dim=2) for t in (b, c))
    dt = F.softplus(dt + w["mixer.dt_bias"]).clamp(*ssm["dt_limit"])
    decay = torch.exp(-dt * torch.exp(w["mixer.A_log"]))
    memory, outputs = u.new_zeros(len(u), h, p, n), []
    for t in range(u.shape[1]):
        written = torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], b[:, t])
        memory = decay[:, t, :, None, None] * memory + written
        outputs.append(torch.einsum("bhpn,bhn->bhp", memory, c[:, t]) + w["mixer.D"][:, None] * x[:, t])
    y = torch.stack(outputs, 1).flatten(2) * F.silu(z)
    y = rms(y.unflatten(-1, (g, inner // g))).flatten(2) * w["mixer.norm.weight"]
    return F.linear(y, w["mixer.out_proj.weight"], w.get("mixer.out_proj.bias"))


# The whole config.json of state-spaces/mamba-130m, of 2023: no layer is named, and neither is the tie.
REAL1 = {
    "d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}, "rms_norm": True, "residual_in_fp32": True,
    "fused_add_norm": True, "pad_vocab_size_multiple": 8,
}  # fmt: skip
REAL2 = {
    **REAL1, "d_intermediate": 0, "ssm_cfg": {"layer": "Mamba2"}, "attn_layer_idx": [], "attn_cfg": {},
    "pad_vocab_size_multiple": 16, "tie_embeddings": True,
}  # fmt: skip
SMALL = {"n_layer": 2, "vocab_size": 41}  # padded to 48
MAMBA1 = SimpleNamespace(
    real=REAL1, scan=scan1, model=MambaForCausalLM, config=MambaConfig, ssm={}, bound=1e-4,
    tiny={**REAL1, **SMALL, "d_model": 20},  # a dt_rank of 2
    fields={"vocab_size": 48, "hidden_size": 20, "num_hidden_layers": 2},
)  # fmt: skip
SSM2 = {"layer": "Mamba2", "d_state": 8, "headdim": 8, "chunk_size": 8}
MAMBA2 = SimpleNamespace(
    real=REAL2, scan=scan2, model=Mamba2ForCausalLM, config=Mamba2Config, ssm=SSM2, bound=2e-4,
    tiny={**REAL2, **SMALL, "d_model": 16, "ssm_cfg": SSM2},
    fields={"num_heads": 4, "head_dim": 8, "vocab_size": 48, "hidden_size": 16, "state_size": 8, "num_hidden_layers": 2,
            "n_groups": 1, "chunk_size": 8, "tie_word_embeddings": True},
)  # fmt: skip
GENERATIONS = {"Mamba1": MAMBA1, "Mamba2": MAMBA2}


@pytest.fixture(params=GENERATIONS)
def of(request):
    """A generation: its real config and a tiny one, the stock model of the same shape, its equations."""
    return GENERATIONS[request.param]


def tiny(of, **ssm):
    return {**of.tiny, "ssm_cfg": {**of.ssm, **ssm}}


def stock(of, dtype=torch.float32, **overrides):
    """A random model of the tiny shape, made without the code under test. No tensor keeps a default value."""
    model, generator = of.model(of.config(**{**of.fields, **overrides})), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.5 + (1 if "norm" in name else 0))
    return model.eval().to(dtype)


def state_of(model):
    """The original names. Tied tensors share their memory, as in the files of state-spaces."""
    return {name.replace(".embeddings.", ".embedding."): tensor for name, tensor in model.state_dict().items()}


def write(folder, config, state, kind="bin"):
    """Write a folder, return the config as read back from it."""
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        tied = config.get("tie_embeddings", True)
        save_file({k: v for k, v in state.items() if not (tied and k == "lm_head.weight")}, folder / "model.safetensors")
    return json.loads((folder / "config.json").read_text())


def refused(folder, config, *words):
    with pytest.raises(UserError) as caught:
        load_folder(folder, config)
    says(caught.value, words)


def refused_config(config, *words):
    with pytest.raises(UserError) as caught:
        original_config(config)
    says(caught.value, words)


def says(error, words):
    assert "\n" not in str(error)
    assert all(word in str(error) for word in words), str(error)


def becomes(folder, config, base):
    """Load a folder that was written from `base`: the same class, type of numbers, tie and logits, ready to be trained."""
    model, dtype = load_folder(folder, config), base.lm_head.weight.dtype
    assert type(model) is type(base)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {dtype} == {model.config.dtype}
    assert all(p.requires_grad and p.device.type == "cpu" for p in model.parameters())
    assert (model.lm_head.weight is model.backbone.embeddings.weight) == config.get("tie_embeddings", True)
    same_logits(model, base)
    return model


@torch.no_grad()
def same_logits(model, other):
    logits = model(IDS).logits
    assert logits.shape == (2, 19, 48)
    assert torch.equal(logits, other(IDS).logits)


@torch.no_grad()
def agrees(folder, config, state, scan, bound):
    """The folder's logits are those of the equations in float64. The bound is for fp32 rounding, logits reach 10; a tensor or a
    field in the wrong place costs more than 1."""
    model = load_folder(folder, write(folder, config, state))
    exact = reference_logits({name: tensor.double() for name, tensor in state.items()}, config, IDS, scan)
    torch.testing.assert_close(model(IDS).logits.double(), exact, atol=bound, rtol=0)
    return model


def rms(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def layer_of(state, layer):
    return {name.split(f"layers.{layer}.")[1]: tensor for name, tensor in state.items() if f"layers.{layer}." in name}


def reference_logits(state, config, ids, scan):
    """(B, T) -> (B, T, V) of any original model whose layer i is `scan(u, its tensors, config)`; attention layers are
    `attend`."""
    residual = state["backbone.embedding.weight"][ids]
    for layer in range(config["n_layer"]):
        w = layer_of(state, layer)
        mix = attend if layer in config.get("attn_layer_idx", ()) else scan
        residual = residual + mix(rms(residual) * w["norm.weight"], w, config)
    return F.linear(rms(residual) * state["backbone.norm_f.weight"], state["lm_head.weight"])


def attend(u, w, config):
    """mamba_ssm's MHA, number by number and as its arguments say: one projection for q, k and v, a convolution without
    activation, the leading dimensions of a head turned in halves, a softmax over what has been seen. (B, T, D) -> (B, T, D)."""
    c = {"rotary_emb_dim": 0, "rotary_emb_base": 10000.0, "d_conv": 0, **config["attn_cfg"]}
    heads, groups = c["num_heads"], c.get("num_heads_kv", c["num_heads"])
    d = c.get("head_dim", config["d_model"] // heads)
    qkv = F.linear(u, w["mixer.in_proj.weight"], w.get("mixer.in_proj.bias"))
    if c["d_conv"]:
        taps, rows = w["mixer.conv1d.weight"], qkv
        qkv = w["mixer.conv1d.bias"].expand_as(rows).clone()
        for t in range(u.shape[1]):
            for back in range(min(c["d_conv"], t + 1)):
                qkv[:, t] += taps[:, 0, c["d_conv"] - 1 - back] * rows[:, t - back]
    half = c["rotary_emb_dim"] // 2

    def turned(x, t):
        y = x.clone()
        for i in range(half):
            angle = t * c["rotary_emb_base"] ** (-2 * i / c["rotary_emb_dim"])
            y[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            y[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return y

    y = u.new_zeros(*u.shape[:2], heads * d)
    for row in range(len(u)):
        for h in range(heads):
            g = h // (heads // groups)
            places = [slice(start * d, (start + 1) * d) for start in (h, heads + g, heads + groups + g)]
            q, k, v = ([qkv[row, t, place] for t in range(u.shape[1])] for place in places)
            for t in range(u.shape[1]):
                scores = torch.stack([turned(q[t], t) @ turned(k[s], s) for s in range(t + 1)])
                shares = (scores * c.get("softmax_scale", d**-0.5)).softmax(0)
                y[row, t, places[0]] = sum(share * v[s] for s, share in enumerate(shares))
    return F.linear(y, w["mixer.out_proj.weight"], w.get("mixer.out_proj.bias"))


def test_the_real_configurations():
    expected = {
        "num_hidden_layers": 24, "hidden_size": 768, "layer_norm_epsilon": 1e-5, "expand": 2, "conv_kernel": 4,
        "use_bias": False, "use_conv_bias": True, "hidden_act": "silu", "residual_in_fp32": True, "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    own = {
        "Mamba1": {"vocab_size": 50280, "intermediate_size": 1536, "state_size": 16, "time_step_rank": 48},
        "Mamba2": {"vocab_size": 50288, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1, "chunk_size": 256,
                   "time_step_limit": (0.0, math.inf)},
    }  # fmt: skip
    for name, of in GENERATIONS.items():
        assert reads(of.real)
        config = original_config(of.real)
        assert type(config) is of.config
        assert {field: getattr(config, field) for field in expected | own[name]} == expected | own[name]


def test_an_original_folder_needs_both_fields_and_no_model_type():
    assert not reads(Mamba2Config().to_dict())
    assert not reads({**REAL2, "model_type": "mamba2"})
    assert not reads({"d_model": 768})


def test_its_reader_is_found_by_listing():
    assert reader_of(REAL1) is reader_of(REAL2) is mamba_ssm
    assert reader_of(Mamba2Config().to_dict()) is reader_of({}) is None


LEAST = {"d_model": 768, "n_layer": 24, "vocab_size": 50277}
KERNELS1 = {
    "dt_min": 0.01, "dt_max": 0.2, "dt_init": "constant", "dt_scale": 2.0, "dt_init_floor": 1e-3, "use_fast_path": False,
}  # fmt: skip
KERNELS2 = {
    "A_init_range": [1, 16], "dt_min": 0.01, "dt_max": 0.2, "dt_init_floor": 1e-3, "conv_init": None, "use_mem_eff_path": False,
    "rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False, "dt_limit": [0.0, math.inf], "d_ssm": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "same"),
    [
        ({**REAL1, "ssm_cfg": None}, REAL1), ({**REAL1, "ssm_cfg": {"layer": "Mamba1"}}, REAL1),
        ({**REAL1, "d_intermediate": 0, "attn_cfg": {}}, REAL1),
        (LEAST, REAL1), ({**LEAST, "pad_vocab_size_multiple": 16, "ssm_cfg": {"layer": "Mamba2"}}, REAL2),
        (tiny(MAMBA1, **KERNELS1), MAMBA1.tiny), (tiny(MAMBA2, **KERNELS2), MAMBA2.tiny),
    ],
)  # fmt: skip
def test_ways_to_say_the_same(config, same):
    """What is absent has the default of mamba_ssm; what initialises or chooses kernels changes nothing."""
    assert original_config(config).to_dict() == original_config(same).to_dict()


def test_what_is_derived():
    for width, said, rank in ((2560, "auto", 160), (40, "auto", 3), (40, 7, 7)):
        assert original_config({**REAL1, "d_model": width, "ssm_cfg": {"dt_rank": said}}).time_step_rank == rank
    assert original_config({**REAL2, "vocab_size": 41}).vocab_size == 48
    assert original_config({**REAL2, "vocab_size": 64}).vocab_size == 64  # a multiple stays


@pytest.mark.parametrize(
    ("kind", "dtype", "tied"),
    [
        ("bin", torch.float32, True), ("bin", torch.bfloat16, False), ("safetensors", torch.bfloat16, True),
        ("safetensors", torch.float16, False),
    ],
)  # fmt: skip
def test_logits_are_exactly_those_of_the_stock_model(tmp_path, of, tied, dtype, kind):
    for ssm, fields in ({}, {}), *([({"ngroups": 2}, {"n_groups": 2})] if of is MAMBA2 else []):
        base = stock(of, dtype, tie_word_embeddings=tied, **fields)
        becomes(tmp_path, write(tmp_path, {**tiny(of, **ssm), "tie_embeddings": tied}, state_of(base), kind), base)


def test_residual_in_half_precision_and_files_from_before_torch_16(tmp_path, of):
    base = stock(of, torch.bfloat16, residual_in_fp32=False)
    config = write(tmp_path, {**of.tiny, "residual_in_fp32": False}, state_of(base))
    becomes(tmp_path, config, base)
    torch.save(state_of(base), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    becomes(tmp_path, config, base)


@pytest.mark.parametrize(
    ("of", "ssm", "fields"),
    [
        (MAMBA1, {}, {}), (MAMBA1, {"layer": "Mamba1", "dt_rank": "auto", "d_state": 16}, {}),
        (MAMBA1, {"d_state": 5}, {"state_size": 5}), (MAMBA1, {"dt_rank": 3}, {"time_step_rank": 3}),
        (MAMBA1, {"expand": 3}, {"expand": 3}), (MAMBA1, {"d_conv": 3}, {"conv_kernel": 3}),
        (MAMBA1, {"bias": True, "conv_bias": False}, {"use_bias": True, "use_conv_bias": False}),
        (MAMBA2, {}, {}), (MAMBA2, {"ngroups": 2}, {"n_groups": 2}), (MAMBA2, {"d_conv": 3}, {"conv_kernel": 3}),
        (MAMBA2, {"bias": True, "conv_bias": False}, {"use_bias": True, "use_conv_bias": False}),
        (MAMBA2, {"dt_limit": [0.5, 1.0]}, {"time_step_limit": (0.5, 1.0)}),
    ],
)  # fmt: skip
def test_logits_agree_with_the_equations(tmp_path, of, ssm, fields):
    agrees(tmp_path, tiny(of, **ssm), state_of(stock(of, **fields)), of.scan, of.bound)


def test_mixed_dtypes_become_the_one_that_holds_all(tmp_path, of):
    state = state_of(stock(of, torch.bfloat16))
    for name in [name for name in state if name.endswith((".A_log", ".D"))]:
        state[name] = state[name].float() / 3  # mamba_ssm keeps them in fp32 whatever the model's dtype
    model = load_folder(tmp_path, write(tmp_path, of.tiny, state))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.equal(state_of(model)[name], tensor.float()) for name, tensor in state.items())


def test_the_model_survives_transformers_own_format(tmp_path, of):
    ssm, fields = ({"dt_rank": 3}, {"time_step_rank": 3}) if of is MAMBA1 else ({"ngroups": 2}, {"n_groups": 2})
    model = load_folder(tmp_path, write(tmp_path, tiny(of, **ssm), state_of(stock(of, torch.bfloat16, **fields))))
    model.save_pretrained(tmp_path / "again")
    same_logits(type(model).from_pretrained(tmp_path / "again", dtype="auto"), model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d_intermediate": 1024}, ("d_intermediate", "1024")), ({"rms_norm": False}, ("rms_norm", "LayerNorm")),
        ({"rms_norm": "yes"}, ("rms_norm", "yes")), ({"fused_add_norm": None}, ("fused_add_norm",)),
        ({"residual_in_fp32": 1}, ("residual_in_fp32",)), ({"tie_embeddings": "no"}, ("tie_embeddings",)),
        ({"norm_epsilon": 1e-6}, ("norm_epsilon", "unknown")), ({"d_model": "768"}, ("d_model", "positive")),
        ({"n_layer": True}, ("n_layer",)), ({"n_layer": 0}, ("n_layer",)), ({"vocab_size": None}, ("vocab_size",)),
        ({"vocab_size": 50277.0}, ("vocab_size",)), ({"pad_vocab_size_multiple": 0}, ("pad_vocab_size_multiple",)),
        ({"ssm_cfg": {"layer": "Mamba3"}}, ("ssm_cfg.layer", "Mamba3")),
        ({"ssm_cfg": {"layer": ["Mamba2"]}}, ("ssm_cfg.layer", "['Mamba2']")), ({"ssm_cfg": "Mamba1"}, ("ssm_cfg", "object")),
        ({"d_model": 20, "ssm_cfg": {"layer": "Mamba2"}}, ("ssm_cfg.headdim", "64", "40")),
    ],
)  # fmt: skip
def test_refused_fields(of, change, words):
    refused_config({**of.real, **change}, *words)


BAD1 = [
    ("d_state", 0), ("d_conv", "4"), ("expand", 1.5), ("dt_rank", 0), ("dt_rank", "full"), ("dt_rank", None), ("bias", 0),
    ("conv_bias", None), ("activation", "gelu"),
    ("headdim", 64), ("ngroups", 1), ("chunk_size", 256), ("dt_limit", [0.0, 0.1]), ("use_mem_eff_path", True),  # Mamba-2's
]  # fmt: skip
BAD2 = [
    ("D_has_hdim", True), ("rmsnorm", False), ("norm_before_gate", True), ("bias", 0), ("dt_limit", [0.0]),
    ("dt_limit", [1.0, 0.5]), ("dt_limit", [0.0, "inf"]), ("dt_limit", [math.nan, math.inf]), ("d_ssm", 512),
    ("headdim", 100), ("ngroups", 5), ("expand", 1.5), ("d_state", -1), ("chunk_size", "256"), ("activation", "gelu"),
    ("dt_rank", "auto"),  # Mamba-1's
]  # fmt: skip


@pytest.mark.parametrize(("layer", "bad"), [({}, BAD1), ({"layer": "Mamba2"}, BAD2)])
def test_refused_fields_of_ssm_cfg(layer, bad):
    for name, value in bad:
        with pytest.raises(UserError, match=rf"^config\.json: ssm_cfg\.{name} [^\n]+$"):
            original_config({**REAL1, "ssm_cfg": {**layer, name: value}})


def test_required_fields(of):
    for name in ("d_model", "n_layer", "vocab_size"):
        refused_config({k: v for k, v in of.real.items() if k != name}, f"{name} is missing")


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_refused_tensors(tmp_path, of, kind):
    state, rates = state_of(stock(of)), "backbone.layers.1.mixer.A_log"
    shape = tuple(state[rates].shape)
    wrong = (*shape[:-1], shape[-1] - 1)
    other = "backbone.layers.1.mixer.norm.weight" if of is MAMBA1 else "backbone.layers.2.norm.weight"
    for changed, words in (
        ({k: v for k, v in state.items() if k != rates}, (rates, "missing")),
        ({**state, rates: torch.ones(wrong)}, (rates, str(wrong), str(shape))),
        ({**state, other: torch.ones(16)}, (other, "unexpected")),
        ({**state, rates: torch.ones(shape, dtype=torch.int32)}, (rates, "int32")),
        ({**state, rates: torch.ones(shape, dtype=torch.float64)}, (rates, "float64")),
        ({k.replace(".embedding.", ".embeddings."): v for k, v in state.items()}, ("backbone.embedding.weight", "missing")),
    ):
        refused(tmp_path, write(tmp_path, of.tiny, changed, kind), *words)


def test_heads_and_ties(tmp_path, of):
    state = state_of(stock(of, tie_word_embeddings=False))
    refused(tmp_path, write(tmp_path, of.tiny, state), "lm_head.weight", "tie_embeddings")
    state["lm_head.weight"] = state["backbone.embedding.weight"].clone()  # equal is as good as shared
    load_folder(tmp_path, write(tmp_path, of.tiny, state))
    del state["lm_head.weight"]
    load_folder(tmp_path, write(tmp_path, of.tiny, state))
    refused(tmp_path, write(tmp_path, {**of.tiny, "tie_embeddings": False}, state), "lm_head.weight", "missing")


@pytest.mark.parametrize(
    ("of", "ssm", "words"),
    [
        (MAMBA1, {"dt_rank": 3}, ("x_proj", "shape")), (MAMBA1, {"d_state": 8}, ("A_log", "shape")),
        (MAMBA1, {"d_conv": 3}, ("conv1d", "shape")), (MAMBA1, {"expand": 1}, ("A_log", "shape")),
        (MAMBA1, {"bias": True}, ("in_proj.bias", "missing")), (MAMBA1, {"conv_bias": False}, ("conv1d.bias", "unexpected")),
        (MAMBA1, {"layer": "Mamba2", "headdim": 8}, ("dt_bias", "missing")), (MAMBA2, {"ngroups": 2}, ("shape",)),
    ],
)  # fmt: skip
def test_a_wrong_field_is_noticed_by_the_shapes(tmp_path, of, ssm, words):
    """Also the other generation's name."""
    refused(tmp_path, write(tmp_path, tiny(of, **ssm), state_of(stock(of))), "backbone.layers.0.mixer", *words)


def test_a_folder_that_forgets_to_say_mamba2(tmp_path):
    config = write(tmp_path, {**MAMBA2.tiny, "ssm_cfg": {}}, state_of(stock(MAMBA2)))
    refused(tmp_path, config, "A_log", "shape")


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_damaged_and_missing_files(tmp_path, kind):
    refused(tmp_path, REAL2, str(tmp_path), "model.safetensors", "pytorch_model.bin")
    config = write(tmp_path, MAMBA2.tiny, state_of(stock(MAMBA2)), kind)
    path = tmp_path / ("pytorch_model.bin" if kind == "bin" else "model.safetensors")
    whole = path.read_bytes()
    for damaged in (b"", b"\x93garbage" * 40, whole[: len(whole) // 2], whole[9:]):
        path.write_bytes(damaged)
        refused(tmp_path, config, str(path), "cannot read")


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return builtins.open, (str(self.marker), "w")


@pytest.mark.parametrize("form", ["zip", "old", "plain"])
def test_a_malicious_pickle_does_not_run(tmp_path, form):
    marker, path = tmp_path / "marker", tmp_path / "pytorch_model.bin"
    state = {**state_of(stock(MAMBA2)), "evil": Evil(marker)}
    if form == "plain":
        path.write_bytes(pickle.dumps(Evil(marker), protocol=2))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "zip")
    refused(tmp_path, MAMBA2.tiny, str(path), "more than tensors")
    assert not marker.exists()
    torch.load(path, weights_only=False) if form != "plain" else pickle.loads(path.read_bytes()).close()
    assert marker.exists()  # the trap works


@pytest.mark.parametrize(("content", "word"), [([1, 2], "list"), ({"model": {"a": 1}}, "'model'"), ({3: torch.ones(1)}, "3")])
def test_pickles_of_something_else(tmp_path, content, word):
    torch.save(content, tmp_path / "pytorch_model.bin")
    refused(tmp_path, MAMBA2.tiny, "pytorch_model.bin", word)
