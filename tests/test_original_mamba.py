"""Original state-spaces folders of Mamba-1, and the model they must become: transformers' own, and the paper's equations."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from surgery.errors import UserError
from surgery.loading.original import is_original, load_original, original_config
from tests import test_original as mamba2
from tests.test_original import (
    agrees,
    becomes,
    becomes_float32,
    randomised,
    refused,
    refused_config,
    state_of,
    survives_transformers_own_format,
    write,
)

# The whole config.json of state-spaces/mamba-130m, of 2023: no layer is named, and neither is the tie.
REAL_130M: dict[str, Any] = {
    "d_model": 768,
    "n_layer": 24,
    "vocab_size": 50277,
    "ssm_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
}
TINY: dict[str, Any] = {**REAL_130M, "d_model": 20, "n_layer": 2, "vocab_size": 41}  # padded to 48, a dt_rank of 2


def tiny(**ssm: Any) -> dict[str, Any]:
    return {**TINY, "ssm_cfg": ssm}


def stock(dtype: torch.dtype = torch.float32, **overrides: Any) -> MambaForCausalLM:
    """A random model of TINY's shape, made without the code under test. No tensor keeps a default value."""
    fields: dict[str, Any] = {"vocab_size": 48, "hidden_size": 20, "num_hidden_layers": 2}
    return randomised(MambaForCausalLM(MambaConfig(**{**fields, **overrides})), dtype)


def scan(u: torch.Tensor, w: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """Mamba-1 token by token from the original tensors of a layer (B, T, D) -> (B, T, D), after arXiv 2312.00752 (algorithm 2,
    figure 3) and mamba_ssm's layout: in_proj gives [x, z], x_proj gives [dt, B, C]."""
    n, rank = config["ssm_cfg"].get("d_state", 16), config["ssm_cfg"].get("dt_rank", "auto")
    rank = math.ceil(config["d_model"] / 16) if rank == "auto" else rank
    x, z = F.linear(u, w["mixer.in_proj.weight"], w.get("mixer.in_proj.bias")).chunk(2, dim=-1)
    taps = w["mixer.conv1d.weight"]
    past = F.pad(x.transpose(1, 2), (taps.shape[-1] - 1, 0))
    x = F.silu(F.conv1d(past, taps, w.get("mixer.conv1d.bias"), groups=taps.shape[0])).transpose(1, 2)
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


def test_real_config() -> None:
    assert is_original(REAL_130M)
    config = original_config(REAL_130M)
    assert type(config) is MambaConfig
    expected = {
        "vocab_size": 50280,
        "hidden_size": 768,
        "intermediate_size": 1536,
        "state_size": 16,
        "num_hidden_layers": 24,
        "layer_norm_epsilon": 1e-5,
        "expand": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "residual_in_fp32": True,
        "time_step_rank": 48,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("change", [{"ssm_cfg": None}, {"ssm_cfg": {"layer": "Mamba1"}}, {"d_intermediate": 0, "attn_cfg": {}}])
def test_ways_to_say_the_same(change: dict[str, Any]) -> None:
    assert original_config({**REAL_130M, **change}).to_dict() == original_config(REAL_130M).to_dict()


def test_what_is_absent_has_the_default_of_mamba_ssm() -> None:
    config = original_config({"d_model": 768, "n_layer": 24, "vocab_size": 50277})
    assert config.to_dict() == original_config(REAL_130M).to_dict()


@pytest.mark.parametrize(("width", "said", "rank"), [(2560, "auto", 160), (40, "auto", 3), (40, 7, 7)])
def test_rank_of_the_time_step(width: int, said: Any, rank: int) -> None:
    assert original_config({**REAL_130M, "d_model": width, "ssm_cfg": {"dt_rank": said}}).time_step_rank == rank


def test_fields_of_initialisation_and_kernels_change_nothing() -> None:
    extra = {"dt_min": 0.01, "dt_max": 0.2, "dt_init": "constant", "dt_scale": 2.0, "dt_init_floor": 1e-3}
    assert original_config(tiny(**extra, use_fast_path=False)).to_dict() == original_config(TINY).to_dict()


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_exactly_those_of_the_stock_model(tmp_path: Path, tied: bool, dtype: torch.dtype, kind: str) -> None:
    base = stock(dtype, tie_word_embeddings=tied)
    config = write(tmp_path, {**TINY, "tie_embeddings": tied}, state_of(base), kind)
    becomes(tmp_path, config, base)


@pytest.mark.parametrize(
    ("ssm", "overrides"),
    [
        ({}, {}),
        ({"layer": "Mamba1", "dt_rank": "auto", "d_state": 16}, {}),
        ({"d_state": 5}, {"state_size": 5}),
        ({"dt_rank": 3}, {"time_step_rank": 3}),
        ({"bias": True, "conv_bias": False}, {"use_bias": True, "use_conv_bias": False}),
        ({"d_conv": 3}, {"conv_kernel": 3}),
        ({"expand": 3}, {"expand": 3}),
    ],
)
def test_logits_agree_with_the_equations(tmp_path: Path, ssm: dict[str, Any], overrides: dict[str, Any]) -> None:
    agrees(tmp_path, tiny(**ssm), state_of(stock(**overrides)), scan, bound=1e-4)


def test_residual_in_half_precision(tmp_path: Path) -> None:
    base = stock(torch.bfloat16, residual_in_fp32=False)
    becomes(tmp_path, write(tmp_path, {**TINY, "residual_in_fp32": False}, state_of(base)), base)


def test_mixed_dtypes_become_the_one_that_holds_all(tmp_path: Path) -> None:
    state = state_of(stock(torch.bfloat16))
    for name in [name for name in state if name.endswith((".A_log", ".D"))]:
        state[name] = state[name].float() / 3  # mamba_ssm keeps them in fp32 whatever the model's dtype
    becomes_float32(tmp_path, TINY, state)


def test_the_model_survives_transformers_own_format(tmp_path: Path) -> None:
    model = load_original(tmp_path, write(tmp_path, tiny(dt_rank=3), state_of(stock(torch.bfloat16, time_step_rank=3))))
    survives_transformers_own_format(model, tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d_intermediate": 1024}, ("d_intermediate", "1024")),
        ({"rms_norm": False}, ("rms_norm", "LayerNorm")),
        ({"residual_in_fp32": "yes"}, ("residual_in_fp32",)),
        ({"tie_embeddings": 1}, ("tie_embeddings",)),
        ({"norm_epsilon": 1e-6}, ("norm_epsilon", "unknown")),
        ({"bidirectional": True}, ("bidirectional", "unknown")),
        ({"d_model": "768"}, ("d_model", "positive")),
        ({"n_layer": 0}, ("n_layer",)),
        ({"vocab_size": 50277.0}, ("vocab_size",)),
        ({"pad_vocab_size_multiple": 0}, ("pad_vocab_size_multiple",)),
        ({"ssm_cfg": "Mamba1"}, ("ssm_cfg", "object")),
    ],
)
def test_refused_fields(change: dict[str, Any], words: tuple[str, ...]) -> None:
    refused_config({**REAL_130M, **change}, *words)


@pytest.mark.parametrize("layer", [{}, {"layer": "Mamba1"}])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("d_state", 0),
        ("d_conv", "4"),
        ("expand", 1.5),
        ("dt_rank", 0),
        ("dt_rank", "full"),
        ("dt_rank", None),
        ("bias", 0),
        ("conv_bias", None),
        ("headdim", 64),  # these are Mamba-2's
        ("ngroups", 1),
        ("chunk_size", 256),
        ("dt_limit", [0.0, 0.1]),
        ("use_mem_eff_path", True),
        ("activation", "gelu"),
    ],
)
def test_refused_fields_of_ssm_cfg(name: str, value: Any, layer: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"^config\.json: ssm_cfg\.{name} [^\n]+$"):
        original_config({**REAL_130M, "ssm_cfg": {**layer, name: value}})


@pytest.mark.parametrize("real", [REAL_130M, mamba2.REAL_130M], ids=["Mamba1", "Mamba2"])
@pytest.mark.parametrize("name", ["d_model", "n_layer", "vocab_size"])
def test_required_fields(name: str, real: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{name} is missing"):
        original_config({k: v for k, v in real.items() if k != name})


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_refused_tensors(tmp_path: Path, kind: str) -> None:
    state, rates = state_of(stock()), "backbone.layers.1.mixer.A_log"
    cases: list[tuple[dict[str, torch.Tensor], tuple[str, ...]]] = [
        ({k: v for k, v in state.items() if k != rates}, (rates, "missing")),
        ({**state, rates: torch.ones(40, 15)}, (rates, "(40, 15)", "(40, 16)")),
        ({**state, "backbone.layers.1.mixer.norm.weight": torch.ones(40)}, ("mixer.norm.weight", "unexpected")),
        ({**state, rates: torch.ones(40, 16, dtype=torch.float64)}, (rates, "float64")),
        ({k.replace(".embedding.", ".embeddings."): v for k, v in state.items()}, ("backbone.embedding.weight", "missing")),
    ]
    for changed, words in cases:
        refused(tmp_path, write(tmp_path, TINY, changed, kind), *words)


def test_a_wrong_field_is_noticed_by_the_shapes(tmp_path: Path) -> None:
    state = state_of(stock())
    for field, value, tensor in (
        ("dt_rank", 3, "x_proj"),
        ("d_state", 8, "A_log"),
        ("d_conv", 3, "conv1d"),
        ("expand", 1, "A_log"),
    ):
        refused(tmp_path, write(tmp_path, tiny(**{field: value}), state), "backbone.layers.0.mixer", tensor, "shape")
    refused(tmp_path, write(tmp_path, tiny(bias=True), state), "in_proj.bias", "missing")
    refused(tmp_path, write(tmp_path, tiny(conv_bias=False), state), "conv1d.bias", "unexpected")


def test_the_two_generations_are_not_confused(tmp_path: Path) -> None:
    """A folder whose config.json forgets to say Mamba2, and one that says so of a Mamba-1."""
    state = state_of(mamba2.stock())
    assert type(load_original(tmp_path, write(tmp_path, mamba2.TINY, state))) is Mamba2ForCausalLM
    refused(tmp_path, write(tmp_path, {**mamba2.TINY, "ssm_cfg": {}}, state), "A_log", "shape")
    refused(tmp_path, write(tmp_path, tiny(layer="Mamba2", headdim=8), state_of(stock())), "dt_bias", "missing")
