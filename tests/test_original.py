"""Original state-spaces folders of Mamba-2, written here from random models: there is no network in the tests."""

import builtins
import json
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedModel

from surgery.errors import UserError
from surgery.loading.original import is_original, load_original, original_config

REAL_130M: dict[str, Any] = {
    "d_model": 768,
    "d_intermediate": 0,
    "n_layer": 24,
    "vocab_size": 50277,
    "ssm_cfg": {"layer": "Mamba2"},
    "attn_layer_idx": [],
    "attn_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}
SSM: dict[str, Any] = {"layer": "Mamba2", "d_state": 8, "headdim": 8, "chunk_size": 8}
TINY: dict[str, Any] = {**REAL_130M, "d_model": 16, "n_layer": 2, "vocab_size": 41, "ssm_cfg": SSM}  # padded to 48
IDS = torch.arange(2 * 19).view(2, 19) * 7 % 41

Mixer = Callable[[torch.Tensor, dict[str, torch.Tensor], dict[str, Any]], torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(**ssm: Any) -> dict[str, Any]:
    return {**TINY, "ssm_cfg": {**SSM, **ssm}}


def stock(dtype: torch.dtype = torch.float32, **overrides: Any) -> Mamba2ForCausalLM:
    """A random model of TINY's shape, made without the code under test. No tensor keeps a default value."""
    fields: dict[str, Any] = {
        "num_heads": 4,
        "head_dim": 8,
        "vocab_size": 48,
        "hidden_size": 16,
        "state_size": 8,
        "num_hidden_layers": 2,
        "n_groups": 1,
        "chunk_size": 8,
        "tie_word_embeddings": True,
    }
    return randomised(Mamba2ForCausalLM(Mamba2Config(**{**fields, **overrides})), dtype)


def randomised(model: PreTrainedModel, dtype: torch.dtype) -> Any:
    """The model with random numbers in every tensor, the same every time."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.5 + (1 if "norm" in name else 0))
    return model.eval().to(dtype)


def state_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The original names. Tied tensors share their memory, as in the files of state-spaces."""
    return {name.replace(".embeddings.", ".embedding."): tensor for name, tensor in model.state_dict().items()}


def write(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor], kind: str = "bin") -> dict[str, Any]:
    """Write a folder, return the config as read back from it."""
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        tied = config.get("tie_embeddings", True)
        save_file({k: v for k, v in state.items() if not (tied and k == "lm_head.weight")}, folder / "model.safetensors")
    return json.loads((folder / "config.json").read_text())


def refused(folder: Path, config: dict[str, Any], *words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_original(folder, config)
    says(caught.value, words)


def refused_config(config: dict[str, Any], *words: str) -> None:
    with pytest.raises(UserError) as caught:
        original_config(config)
    says(caught.value, words)


def says(error: UserError, words: tuple[str, ...]) -> None:
    assert "\n" not in str(error)
    assert all(word in str(error) for word in words), str(error)


def becomes(folder: Path, config: dict[str, Any], base: PreTrainedModel) -> PreTrainedModel:
    """Load a folder that was written from `base`: the same class, type of numbers, tie and logits, ready to be trained."""
    model, dtype = load_original(folder, config), base.lm_head.weight.dtype
    assert type(model) is type(base)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.config.dtype == dtype
    assert all(p.requires_grad and p.device.type == "cpu" for p in model.parameters())
    assert (model.lm_head.weight is model.backbone.embeddings.weight) == config.get("tie_embeddings", True)
    same_logits(model, base)
    return model


@torch.no_grad()
def same_logits(model: PreTrainedModel, other: PreTrainedModel) -> None:
    logits = model(IDS).logits
    assert logits.shape == (2, 19, 48)
    assert torch.equal(logits, other(IDS).logits)


def survives_transformers_own_format(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder / "again")
    same_logits(type(model).from_pretrained(folder / "again", dtype="auto"), model)


def becomes_float32(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    model = load_original(folder, write(folder, config, state))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    loaded = state_of(model)
    assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in state.items())


@torch.no_grad()
def agrees(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor], mixer: Mixer, bound: float) -> PreTrainedModel:
    """The folder's logits are those of the equations in float64. The bound is for fp32 rounding, logits reach 10; a tensor or a
    field in the wrong place costs more than 1."""
    model = load_original(folder, write(folder, config, state))
    exact = reference_logits({name: tensor.double() for name, tensor in state.items()}, config, IDS, mixer)
    torch.testing.assert_close(model(IDS).logits.double(), exact, atol=bound, rtol=0)
    return model


def rms(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def layer_of(state: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    return {name.split(f"layers.{layer}.")[1]: tensor for name, tensor in state.items() if f"layers.{layer}." in name}


def scan(u: torch.Tensor, w: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """Mamba-2 token by token from the original tensors of a layer (B, T, D) -> (B, T, D), written after the paper and
    mamba_ssm's layout: in_proj gives [z, x, B, C, dt]."""
    ssm = {"ngroups": 1, "dt_limit": (0.0, math.inf), **config["ssm_cfg"]}
    n, p, g = ssm["d_state"], ssm["headdim"], ssm["ngroups"]
    inner = 2 * config["d_model"]
    h = inner // p
    z, xbc, dt = F.linear(u, w["mixer.in_proj.weight"], w.get("mixer.in_proj.bias")).split(
        [inner, inner + 2 * g * n, h], dim=-1
    )
    taps = w["mixer.conv1d.weight"]
    past = F.pad(xbc.transpose(1, 2), (taps.shape[-1] - 1, 0))
    xbc = F.silu(F.conv1d(past, taps, w.get("mixer.conv1d.bias"), groups=taps.shape[0])).transpose(1, 2)
    x, b, c = xbc.split([inner, g * n, g * n], dim=-1)
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


def reference_logits(state: dict[str, torch.Tensor], config: dict[str, Any], ids: torch.Tensor, mixer: Mixer) -> torch.Tensor:
    """(B, T) -> (B, T, V) of any original model whose layer i is `mixer(u, its tensors, config)`; attention layers are
    `attend`."""
    residual = state["backbone.embedding.weight"][ids]
    for layer in range(config["n_layer"]):
        w = layer_of(state, layer)
        mix = attend if layer in config.get("attn_layer_idx", ()) else mixer
        residual = residual + mix(rms(residual) * w["norm.weight"], w, config)
    return F.linear(rms(residual) * state["backbone.norm_f.weight"], state["lm_head.weight"])


def attend(u: torch.Tensor, w: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
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

    def turned(x: torch.Tensor, t: int) -> torch.Tensor:
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


def test_real_config() -> None:
    assert is_original(REAL_130M)
    config = original_config(REAL_130M)
    expected = {
        "num_heads": 24,
        "head_dim": 64,
        "vocab_size": 50288,
        "hidden_size": 768,
        "state_size": 128,
        "num_hidden_layers": 24,
        "layer_norm_epsilon": 1e-5,
        "expand": 2,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "residual_in_fp32": True,
        "time_step_limit": (0.0, math.inf),
        "chunk_size": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    assert {name: getattr(config, name) for name in expected} == expected


def test_is_original_needs_both_fields_and_no_model_type() -> None:
    assert not is_original(Mamba2Config().to_dict())
    assert not is_original({**REAL_130M, "model_type": "mamba2"})
    assert not is_original({"d_model": 768})


def test_defaults_are_those_of_mamba_ssm() -> None:
    config = original_config({"d_model": 64, "n_layer": 1, "vocab_size": 41, "ssm_cfg": {"layer": "Mamba2"}})
    assert (config.vocab_size, config.tie_word_embeddings, config.residual_in_fp32) == (48, True, True)
    assert original_config({**REAL_130M, "vocab_size": 64}).vocab_size == 64  # a multiple stays


def test_fields_of_initialisation_and_kernels_change_nothing() -> None:
    extra = {"A_init_range": [1, 16], "dt_min": 0.01, "dt_max": 0.2, "dt_init_floor": 1e-3, "conv_init": None}
    same = {"rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False, "dt_limit": [0.0, math.inf], "d_ssm": 32}
    assert original_config(tiny(**extra, **same, use_mem_eff_path=False)).to_dict() == original_config(tiny()).to_dict()


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_logits_are_exactly_those_of_the_stock_model(
    tmp_path: Path, groups: int, tied: bool, dtype: torch.dtype, kind: str
) -> None:
    base = stock(dtype, n_groups=groups, tie_word_embeddings=tied)
    config = write(tmp_path, {**tiny(ngroups=groups), "tie_embeddings": tied}, state_of(base), kind)
    becomes(tmp_path, config, base)


@pytest.mark.parametrize(
    ("ssm", "overrides"),
    [
        ({}, {}),
        ({"ngroups": 2}, {"n_groups": 2}),
        ({"bias": True, "conv_bias": False}, {"use_bias": True, "use_conv_bias": False}),
        ({"d_conv": 3}, {"conv_kernel": 3}),
        ({"dt_limit": [0.5, 1.0]}, {"time_step_limit": (0.5, 1.0)}),
    ],
)
def test_logits_agree_with_the_recurrence(tmp_path: Path, ssm: dict[str, Any], overrides: dict[str, Any]) -> None:
    agrees(tmp_path, tiny(**ssm), state_of(stock(**overrides)), scan, bound=2e-4)


def test_residual_in_half_precision(tmp_path: Path) -> None:
    base = stock(torch.bfloat16, residual_in_fp32=False)
    becomes(tmp_path, write(tmp_path, {**TINY, "residual_in_fp32": False}, state_of(base)), base)


def test_safetensors_is_preferred(tmp_path: Path) -> None:
    config = write(tmp_path, TINY, state_of(stock()), "safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    load_original(tmp_path, config)


def test_files_from_before_torch_16(tmp_path: Path) -> None:
    base = stock()
    config = write(tmp_path, TINY, state_of(base))
    torch.save(state_of(base), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    becomes(tmp_path, config, base)


def test_mixed_dtypes_become_the_one_that_holds_all(tmp_path: Path) -> None:
    state = state_of(stock(torch.bfloat16))
    state["backbone.layers.0.mixer.D"] = torch.full((4,), 1 / 3)  # mamba_ssm creates D in fp32 whatever the model's dtype
    becomes_float32(tmp_path, TINY, state)


def test_changing_the_model_leaves_the_file_alone(tmp_path: Path) -> None:
    for kind, file in (("bin", "pytorch_model.bin"), ("safetensors", "model.safetensors")):
        config = write(tmp_path, TINY, state_of(stock()), kind)
        before = (tmp_path / file).read_bytes()
        model = load_original(tmp_path, config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert (tmp_path / file).read_bytes() == before


def test_untied_weights_do_not_share_memory(tmp_path: Path) -> None:
    config = write(tmp_path, {**TINY, "tie_embeddings": False}, state_of(stock()))  # a tied file under an untied config
    model = load_original(tmp_path, config)
    assert model.lm_head.weight.data_ptr() != model.backbone.embeddings.weight.data_ptr()


def test_the_model_survives_transformers_own_format(tmp_path: Path) -> None:
    model = load_original(tmp_path, write(tmp_path, tiny(ngroups=2), state_of(stock(torch.bfloat16, n_groups=2))))
    survives_transformers_own_format(model, tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ssm_cfg": {"layer": "Mamba3"}}, ("ssm_cfg.layer", "Mamba3")),
        ({"ssm_cfg": {"layer": ["Mamba2"]}}, ("ssm_cfg.layer", "['Mamba2']")),
        ({"ssm_cfg": {"layer": None}}, ("ssm_cfg.layer", "None")),
        ({"ssm_cfg": ["Mamba2"]}, ("ssm_cfg", "object")),
        ({"d_intermediate": 1024}, ("d_intermediate", "1024")),
        ({"rms_norm": False}, ("rms_norm",)),
        ({"rms_norm": "yes"}, ("rms_norm", "yes")),
        ({"fused_add_norm": None}, ("fused_add_norm",)),
        ({"residual_in_fp32": 1}, ("residual_in_fp32",)),
        ({"tie_embeddings": "no"}, ("tie_embeddings",)),
        ({"norm_epsilon": 1e-6}, ("norm_epsilon", "unknown")),
        ({"d_model": 0}, ("d_model", "positive")),
        ({"d_model": 20}, ("ssm_cfg.headdim", "64", "40")),
        ({"n_layer": True}, ("n_layer",)),
        ({"vocab_size": None}, ("vocab_size",)),
        ({"pad_vocab_size_multiple": 0}, ("pad_vocab_size_multiple",)),
    ],
)
def test_refused_fields(change: dict[str, Any], words: tuple[str, ...]) -> None:
    refused_config({**REAL_130M, **change}, *words)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("D_has_hdim", True),
        ("rmsnorm", False),
        ("norm_before_gate", True),
        ("bias", 0),
        ("dt_limit", [0.0]),
        ("dt_limit", [1.0, 0.5]),
        ("dt_limit", [0.0, "inf"]),
        ("dt_limit", [math.nan, math.inf]),
        ("d_ssm", 512),
        ("headdim", 100),
        ("ngroups", 5),
        ("expand", 1.5),
        ("d_state", -1),
        ("chunk_size", "256"),
        ("dt_rank", "auto"),
        ("activation", "gelu"),
    ],
)
def test_refused_fields_of_ssm_cfg(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^config\.json: ssm_cfg\.{name} [^\n]+$"):
        original_config({**REAL_130M, "ssm_cfg": {"layer": "Mamba2", name: value}})


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_refused_tensors(tmp_path: Path, kind: str) -> None:
    state, norm = state_of(stock()), "backbone.layers.1.mixer.norm.weight"
    cases: list[tuple[dict[str, torch.Tensor], tuple[str, ...]]] = [
        ({k: v for k, v in state.items() if k != norm}, (norm, "missing")),
        ({**state, norm: torch.ones(31)}, (norm, "(31,)", "(32,)")),
        ({**state, "backbone.layers.2.norm.weight": torch.ones(16)}, ("backbone.layers.2.norm.weight", "unexpected")),
        ({**state, norm: torch.ones(32, dtype=torch.int32)}, (norm, "int32")),
        ({**state, norm: torch.ones(32, dtype=torch.float64)}, (norm, "float64")),
        ({k.replace(".embedding.", ".embeddings."): v for k, v in state.items()}, ("backbone.embedding.weight", "missing")),
    ]
    for changed, words in cases:
        refused(tmp_path, write(tmp_path, TINY, changed, kind), *words)


def test_a_missing_head_is_refused_only_when_untied(tmp_path: Path) -> None:
    state = {k: v for k, v in state_of(stock()).items() if k != "lm_head.weight"}
    load_original(tmp_path, write(tmp_path, TINY, state))
    refused(tmp_path, write(tmp_path, {**TINY, "tie_embeddings": False}, state), "lm_head.weight", "missing")


def test_an_untied_head_under_a_tied_config_is_refused(tmp_path: Path) -> None:
    state = state_of(stock(tie_word_embeddings=False))
    refused(tmp_path, write(tmp_path, TINY, state), "lm_head.weight", "tie_embeddings")
    state["lm_head.weight"] = state["backbone.embedding.weight"].clone()  # equal is as good as shared
    load_original(tmp_path, write(tmp_path, TINY, state))


def test_wrong_ngroups_is_noticed(tmp_path: Path) -> None:
    refused(tmp_path, write(tmp_path, tiny(ngroups=2), state_of(stock())), "backbone.layers.0.mixer", "shape")


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
@pytest.mark.parametrize("damage", ["empty", "garbage", "cut", "headless"])
def test_damaged_files(tmp_path: Path, damage: str, kind: str) -> None:
    config = write(tmp_path, TINY, state_of(stock()), kind)
    path = tmp_path / ("pytorch_model.bin" if kind == "bin" else "model.safetensors")
    whole = path.read_bytes()
    broken = {"empty": b"", "garbage": b"\x93garbage" * 40, "cut": whole[: len(whole) // 2], "headless": whole[9:]}
    path.write_bytes(broken[damage])
    refused(tmp_path, config, str(path), "cannot read")


def test_missing_weights(tmp_path: Path) -> None:
    refused(tmp_path, TINY, str(tmp_path), "model.safetensors", "pytorch_model.bin")


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return builtins.open, (str(self.marker), "w")


@pytest.mark.parametrize("form", ["zip", "old", "plain"])
def test_a_malicious_pickle_does_not_run(tmp_path: Path, form: str) -> None:
    marker, path = tmp_path / "marker", tmp_path / "pytorch_model.bin"
    state: dict[str, Any] = {**state_of(stock()), "evil": Evil(marker)}
    if form == "plain":
        path.write_bytes(pickle.dumps(Evil(marker), protocol=2))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "zip")
    refused(tmp_path, TINY, str(path), "more than tensors")
    assert not marker.exists()
    torch.load(path, weights_only=False) if form != "plain" else pickle.loads(path.read_bytes()).close()
    assert marker.exists()  # the trap works


@pytest.mark.parametrize(("content", "word"), [([1, 2], "list"), ({"model": {"a": 1}}, "'model'"), ({3: torch.ones(1)}, "3")])
def test_pickles_of_something_else(tmp_path: Path, content: Any, word: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    refused(tmp_path, TINY, "pytorch_model.bin", word)
