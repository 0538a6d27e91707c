"""Exports to other formats: equal to the live hybrid where they are written, refused with the reason where not."""

import copy
import json
import math
import sys
from functools import cache
from types import ModuleType

import pytest
import torch
from transformers import NemotronHForCausalLM, SmolLM3Config

import surgery
from surgery.errors import UserError
from surgery.exporting.formats import format_of
from surgery.exporting.tolerance import tolerance
from surgery.exporting.verify import difference
from surgery.families import family_of
from surgery.hybrids.layer_graft import layer_spec
from surgery.models.answers import LENGTHS, answers
from surgery.records.plan import Plan
from surgery.serving.formats import mamba_ssm, nemotron_h
from surgery.serving.readers.mamba_ssm import load_folder
from surgery.splicing.splice import adopt, splice
from surgery.world.tokenizer import build_tokenizer
from tests.kernels.inputs import assert_near, rounding
from tests.models import BASES, random_base
from tests.surgery.test_layer_graft import random_donor
from tests.test_original import GENERATIONS, IDS, reference_logits, write
from tests.test_original_attention import folder_of

LAYER = Plan(kind="layer", sites=("L1",), width=16)
TWO = Plan(kind="layer", sites=("L0", "L2"), width=32)
DONOR = Plan(kind="layer", sites=("L1",), donor="a donor")
HEAD = Plan(sites=("L1.H3",))
NEW = 12  # greedy tokens; 64 where the command verifies


def lively(model):
    """As initialised, a small model hardly depends on its input, and nothing would show."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 and "conv" not in name:
                p.copy_(torch.randn(p.shape, generator=generator) * (0.3 if "embed" in name else p.shape[-1] ** -0.5))
    return model


def donated(base, **changes):
    """Attention of four heads of 12 in two groups, without positions."""
    fields = {"no_rope_layers": [1, 0, 1], "hidden": base.config.hidden_size, **changes}
    return splice(base, DONOR, random_donor(SmolLM3Config, **fields))


HYBRIDS = {
    "mamba2": lambda: splice(lively(random_base()), LAYER),
    "mamba2, groups, biases, untied": lambda: splice(
        lively(random_base(n_groups=2, use_bias=True, tie_word_embeddings=False)), LAYER
    ),
    "mamba2, no conv bias, two layers": lambda: splice(lively(random_base(use_conv_bias=False)), TWO),
    "mamba2, grouped queries": lambda: donated(lively(random_base(n_groups=4))),
    "mamba": lambda: splice(BASES["mamba"](), LAYER),
    "mamba, biases, untied": lambda: splice(BASES["mamba, biases, untied"](), LAYER),
    "mamba, donor with RoPE and biases": lambda: donated(BASES["mamba"](), no_rope_layers=[1, 1, 1], attention_bias=True),
    "mamba2, nothing spliced": lambda: adopt(random_base()),
}

NEMOTRONS = ["mamba2, groups, biases, untied", "mamba2, no conv bias, two layers", "mamba2, grouped queries"]
BACK = [
    "mamba2, groups, biases, untied",
    "mamba2, no conv bias, two layers",
    "mamba, biases, untied",
    "mamba2, nothing spliced",
]


# Three layers, of 64 to 256 products in a row for each projection, 100 tokens of a scan, and sums of norms.
ERROR = rounding(3 * 800)


@cache
def hybrid_of(name):
    """Do not change it."""
    return HYBRIDS[name]()


class Words:
    """A tokenizer of 99 words, as far as an export looks."""

    def __len__(self):
        return 99

    def save_pretrained(self, folder):
        pass


def written(form, hybrid, folder):
    form.write(hybrid, folder, tokenizer=Words(), plan=LAYER, base="a base")
    return folder


# Nemotron-H


@pytest.mark.parametrize("name", NEMOTRONS)
def test_nemotron_h_is_the_same_model(name, tmp_path):
    hybrid = hybrid_of(name)
    written(nemotron_h, hybrid, tmp_path)
    loaded, report = NemotronHForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.config.num_attention_heads * loaded.config.head_dim == 64 * hybrid.config.grafts[0]["num_heads"]
    assert difference(answers(hybrid, 99, NEW), answers(loaded, 99, NEW)) <= 1e-4


def test_nemotron_h_config_is_what_the_engines_read(tmp_path):
    written(nemotron_h, hybrid_of("mamba2, no conv bias, two layers"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["NemotronHForCausalLM"]
    assert config["hybrid_override_pattern"] == "*M*"
    assert config["layers_block_type"] == ["attention", "mamba", "attention"]
    assert config["num_hidden_layers"] == 3
    for name, alias in {
        "n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias",
        "chunk_size": "mamba_chunk_size",
    }.items():  # fmt: skip
        assert config[name] == config[alias]
    assert not [name for name in config if "expert" in name or "moe" in name]
    assert "time_step_limit" not in config


@torch.no_grad()
def test_the_comparison_sees_what_a_default_would_change(tmp_path):
    hybrid = hybrid_of("mamba2, groups, biases, untied")
    written(nemotron_h, hybrid, tmp_path)
    config, live = json.loads((tmp_path / "config.json").read_text()), hybrid(IDS).logits
    for change in ({"time_step_min": 0.01}, {"layer_norm_epsilon": 0.1}, {"mamba_hidden_act": "gelu"}):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        found = (NemotronHForCausalLM.from_pretrained(tmp_path)(IDS).logits - live).abs().max()
        assert found > 10 * tolerance(live, IDS.shape[1], 3), change


def test_nemotron_h_in_16_bits_has_the_same_weights_or_none(tmp_path):
    """Heads of 16 need a factor of 2, which bfloat16 has; heads of 32 need one of the root of 2, which it lacks."""
    half = splice(lively(random_base()).to(torch.bfloat16), LAYER)
    written(nemotron_h, half, tmp_path)
    loaded = NemotronHForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert difference(answers(half.float(), 99, NEW), answers(loaded.float(), 99, NEW)) <= 1e-4
    with pytest.raises(UserError, match=r"bfloat16; export it in float32"):
        written(nemotron_h, splice(random_base().to(torch.bfloat16), TWO), tmp_path)


# mamba_ssm


@pytest.mark.parametrize("name", BACK)
def test_mamba_ssm_and_back_is_the_same_bit_for_bit(name, tmp_path):
    hybrid = hybrid_of(name)
    written(mamba_ssm, hybrid, tmp_path)
    again = adopt(load_folder(tmp_path, json.loads((tmp_path / "config.json").read_text()))).state_dict()
    assert again.keys() == hybrid.state_dict().keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in hybrid.state_dict().items())


@pytest.mark.parametrize("name", ["mamba2, grouped queries", "mamba, donor with RoPE and biases"])
@torch.no_grad()
def test_what_is_written_for_mamba_ssm_computes_the_same_by_its_layout(name, tmp_path):
    """Against loops in float64 over the file's own tensors, as mamba_ssm's arguments in config.json say."""
    hybrid = hybrid_of(name)
    written(mamba_ssm, hybrid, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert set(map(type, state.values())) == {torch.Tensor}
    scan = GENERATIONS[config["ssm_cfg"]["layer"]].scan
    exact = reference_logits({name: tensor.double() for name, tensor in state.items()}, config, IDS, scan)
    assert_near(hybrid(IDS).logits, exact, ERROR)


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
def test_an_original_folder_with_attention_comes_back_as_it_was(layer, tmp_path):
    config, state = folder_of(layer, softmax_scale=0.5, rotary_emb_base=100.0, num_heads=4, num_heads_kv=2)
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
    model = load_folder(tmp_path / "first", write(tmp_path / "first", config, state))
    written(mamba_ssm, model, tmp_path / "second")
    again = torch.load(tmp_path / "second" / "pytorch_model.bin", weights_only=True)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
    # What was mapped from a file is written at its own size, and the tied head once.
    size = sum(t.nbytes for name, t in state.items() if name != "lm_head.weight")
    assert (tmp_path / "second" / "pytorch_model.bin").stat().st_size < size + 1000 * len(state)


def test_special_tokens_come_back(tmp_path):
    hybrid = splice(random_base(), LAYER)
    hybrid.generation_config.eos_token_id = [7, 8]
    written(mamba_ssm, hybrid, tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    assert surgery.load(tmp_path).model.generation_config.eos_token_id == [7, 8]


@pytest.fixture
def own_classes(monkeypatch):
    """mamba_ssm's MambaLMHeadModel on the CPU: its classes as they are, with its own references in the place of its kernels.

    `MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps --no-build-isolation mamba-ssm`, and einops, make
    it without a GPU."""
    reason = "mamba_ssm, whose own classes are asked here, is not installed"
    pytest.importorskip("einops", reason=reason)
    monkeypatch.setitem(sys.modules, "selective_scan_cuda", ModuleType("selective_scan_cuda"))  # or it would not import
    pytest.importorskip("mamba_ssm", reason=reason)
    from mamba_ssm.models import mixer_seq_simple
    from mamba_ssm.modules import block, mamba2, mamba_simple
    from mamba_ssm.ops import selective_scan_interface as scans
    from mamba_ssm.ops.triton import layer_norm, layernorm_gated, ssd_combined

    def norm(x, weight, bias, *, is_rms_norm, residual_in_fp32, **options):
        assert is_rms_norm
        return layer_norm.rms_norm_ref(x, weight, bias, **options)

    def scan(*inputs, chunk_size, return_final_states, return_varlen_states, seq_idx, cu_seqlens, **options):
        return ssd_combined.ssd_selective_scan(*inputs, **options)

    for module in (scans, mamba_simple):
        monkeypatch.setattr(module, "selective_scan_fn", scans.selective_scan_ref)
        monkeypatch.setattr(module, "causal_conv1d_fn", None)
    for module in (block, mixer_seq_simple):
        monkeypatch.setattr(module, "layer_norm_fn", norm)
    monkeypatch.setattr(layernorm_gated, "rmsnorm_fn", layernorm_gated.rms_norm_ref)
    monkeypatch.setattr(mamba2, "mamba_chunk_scan_combined", scan)
    monkeypatch.setattr(mamba2, "causal_conv1d_fn", None)
    return mixer_seq_simple.MambaLMHeadModel


@pytest.mark.parametrize("name", [name for name in HYBRIDS if "RoPE" not in name])  # which needs flash-attn there
@torch.no_grad()
def test_mamba_ssm_own_classes_give_the_same_logits(own_classes, name, tmp_path):
    """After prompts of several lengths, one by one and as a batch, and over 64 greedy tokens, which are the ones that it
    chooses itself. It knows no padding, and generates from a cache with flash-attn only."""
    hybrid = hybrid_of(name)
    own = own_classes.from_pretrained(str(written(mamba_ssm, hybrid, tmp_path)), device="cpu").eval()
    for layer in own.backbone.layers:
        layer.mixer.use_mem_eff_path = False  # its fused kernel for training
    whole, exact = torch.ones_like(IDS), copy.deepcopy(hybrid).double()  # the id of padding occurs
    long = hybrid.generate(IDS, attention_mask=whole, do_sample=False, min_new_tokens=64, max_new_tokens=64)
    assert torch.equal(own(long).logits.argmax(-1)[:, -65:-1], long[:, -64:])
    for ids in (IDS, long, *(long[:1, :length] for length in LENGTHS)):
        truth = exact(ids).logits
        assert_near(own(ids).logits, truth, ERROR)
        assert_near(hybrid(ids).logits, truth, ERROR)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="mamba_ssm's own kernels need a CUDA device, and the package")
@pytest.mark.parametrize("name", ["mamba2", "mamba"])
def test_mamba_ssm_own_kernels(name, tmp_path):
    mamba_lm = pytest.importorskip("mamba_ssm", reason="mamba_ssm is not installed").MambaLMHeadModel
    hybrid = hybrid_of(name)
    own = mamba_lm.from_pretrained(str(written(mamba_ssm, hybrid, tmp_path)), device="cuda", dtype=torch.float32)
    torch.testing.assert_close(own(IDS.cuda()).logits.cpu(), hybrid(IDS).logits, atol=1e-3, rtol=0)


# What neither can hold


def with_spec(**changes):
    """A Mamba-2 whose layer graft is of a kind that no splice makes; without values, for refusals only."""
    config = random_base().config
    return family_of(config).empty(config, None, [layer_spec(1, 4, 16, **changes)])


def odd(**changes):
    base = random_base()
    for name, value in changes.items():
        setattr(base.config, name, value)
    return splice(base, LAYER)


ROPE = {"dim": 8, "theta": 10000.0}
MLP = {"intermediate_size": 32, "hidden_act": "silu", "norm_eps": 1e-5}
REFUSED = {
    "nemotron_h": [
        (lambda: hybrid_of("mamba"), "this is a mamba_hybrid"),
        (lambda: hybrid_of("mamba2, nothing spliced"), "without any attention layer"),
        (lambda: splice(random_base(), HEAD), "in L1 heads are grafted"),
        (lambda: with_spec(rope=ROPE), "in L1 the attention has positions"),
        (lambda: with_spec(conv=4, bias=["qkv_conv"]), "in L1 the attention has a convolution"),
        (lambda: with_spec(qk_norm=1e-6), "in L1 the attention normalises"),
        (lambda: with_spec(mlp=MLP), "in L1 the attention brings its donor's MLP"),
        (lambda: with_spec(bias=["o_proj"]), "in L1 the attention has biases"),
        (lambda: splice(random_base(time_step_limit=(0.01, math.inf)), LAYER), "the time step is bounded"),
        (lambda: splice(random_base(hidden_size=512, num_heads=64), Plan(kind="layer", sites=("L1",), width=512)), "512 wide"),
        (lambda: odd(hidden_act="gelu"), "activation is gelu"),
    ],
    "mamba_ssm": [
        (lambda: splice(BASES["falcon mamba"](), LAYER), "normalises B, C and dt"),
        (lambda: splice(BASES["llamba"](), LAYER), "is a llamba"),
        (lambda: splice(random_base(), HEAD), "in L1 heads are grafted"),
        (lambda: with_spec(rope={"inv_freq": [1.0] * 4, "scaling": 1.0}), "the attention's rope has no place"),
        (lambda: with_spec(conv=4), "the attention's bias has no place"),
        (lambda: with_spec(bias=["k_proj"]), "the attention's bias has no place"),
        (lambda: with_spec(qk_norm=1e-6), "the attention's qk_norm has no place"),
        (lambda: with_spec(mlp=MLP), "the attention's mlp has no place"),
        (lambda: splice(random_base(time_step_limit=(0.0, 0.1)), LAYER), "the time step is bounded"),
        (lambda: odd(hidden_act="gelu"), "hidden_act has no place"),
        (lambda: odd(layer_norm_epsilon=1e-6), "layer_norm_epsilon has no place"),
    ],
}


@pytest.mark.parametrize(("form", "make", "reason"), [(form, *case) for form, cases in REFUSED.items() for case in cases])
def test_what_does_not_fit_is_refused_with_the_reason(form, make, reason, tmp_path):
    with pytest.raises(UserError) as caught:
        written(format_of(form), make(), tmp_path)
    assert str(caught.value).startswith(f"the hybrid cannot be exported as {form}: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", REFUSED)
def test_layers_must_be_alike(form, tmp_path):
    config = random_base().config
    mixed = family_of(config).empty(config, None, [layer_spec(0, 4, 16), layer_spec(2, 8, 8)])
    with pytest.raises(UserError, match=r"in L2 the attention has another shape than in L0"):
        written(format_of(form), mixed, tmp_path)
