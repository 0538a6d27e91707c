"""What is the own of Gated DeltaNet and of Kimi Delta Attention; the laws of all families inside stock models are in
test_laws.py."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Glm5NextConfig, Glm5NextForConditionalGeneration

import surgery
from surgery.errors import UserError
from surgery.kernels.delta import delta_rule, unit
from surgery.models.cache import decodes
from surgery.more.hybrids.gated_delta import SHARPNESS
from surgery.records.plan import Plan
from surgery.splicing.splice import splice
from tests.kernels.inputs import assert_near
from tests.models import SAME, VOCABULARY
from tests.surgery.mixer_checks import entering
from tests.surgery.stock_bases import base_of as stock_base

FIELDS = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": None,
}  # fmt: skip
MODELS = {
    "qwen3_next": {"num_experts": 0, "head_dim": 8},
    "qwen3_5_text": {"head_dim": 8},
    "olmo_hybrid": {},
    "olmo_hybrid, rates up to 1": {"linear_allow_neg_eigval": False},
    "kimi_linear": {"mlp_layer_types": ["dense"] * 2, "linear_num_heads": 4, "linear_head_dim": 8, "num_key_value_heads": 4},
}
every_model = pytest.mark.parametrize("name", MODELS)


def base_of(name):
    """In float64; its layer 0 is Gated DeltaNet."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition(",")[0], **FIELDS | MODELS[name])
    return AutoModelForCausalLM.from_config(config).double().eval()


@pytest.fixture
def ids():
    return torch.randint(1, 50, (1, 30), generator=torch.Generator().manual_seed(0))


@every_model
@torch.no_grad()
def test_a_dual_graft_is_softmax_of_the_base_s_own_scores(name, ids):
    """From the stock mixer's parts, step by step, as derivations.md has it."""
    heads, signs, taus = [0, 3], [1, -1], [1.0, 0.5]
    starts = {f"L0.H{head}": {"sign": sign, "tau": tau} for head, sign, tau in zip(heads, signs, taus, strict=True)}
    hybrid = splice(base_of(name), Plan(sites=("L0.H0,3",), starts=starts))
    mixer, u = hybrid.mixer_at(0), entering(hybrid, ids)
    projected = mixer.project(u)
    v, k, q, beta, log_decay = (getattr(projected, part) for part in ("values", "keys", "queries", "rate", "log_decay"))
    y = mixer.mix(projected)
    assert_near(y[:, :, [1, 2]], delta_rule(q, k, v, log_decay, beta)[0][:, :, [1, 2]], 1e-12)
    for head, sign, tau in zip(heads, signs, taus, strict=True):
        queries, keys = (unit(m[0, :, head * m.shape[2] // 4]) for m in (q, k))
        scores = sign * tau * SHARPNESS * queries @ keys.T + beta[0, :, head].log()
        weights = scores.masked_fill(torch.ones(30, 30).triu(1).bool(), -torch.inf).softmax(-1)
        assert_near(y[0, :, head], sign * weights @ v[0, :, head], 1e-7)  # the convolution of transformers is in float32
    assert_near(mixer.finish(y, projected.gate), mixer(u), 1e-12)


@every_model
@torch.no_grad()
def test_the_rate_is_between_0_and_its_most(name, ids):
    hybrid = splice(base_of(name), Plan(sites=("L0.H0",)))
    beta = hybrid.mixer_at(0).project(50 * torch.randn(1, 30, 32, dtype=torch.double)).rate
    most = 2.0 if name == "olmo_hybrid" else 1.0
    assert 0 < beta.min() < 0.1 * most
    assert 0.9 * most < beta.max() <= most


@torch.no_grad()
def test_every_channel_of_kda_decays_by_itself(ids):
    """As transformers' gate says; a bounded one (Ling 3, GLM 5.3) is read from the stock module as well."""
    hybrid = splice(base_of("kimi_linear"), Plan(sites=("L0.H0",)))
    mixer, u = hybrid.mixer_at(0), entering(hybrid, ids)
    log_decay = mixer.project(u).log_decay
    assert log_decay.shape == (1, 30, 4, 8)
    assert torch.equal(log_decay, mixer.forget_gate(u))
    assert (log_decay < 0).all()
    assert log_decay.std(-1).min() > 1e-3


@pytest.mark.usefixtures("in_float64")
@torch.no_grad()
def test_the_language_model_of_a_glm_folder_is_loaded(tokenizer, ids, tmp_path):
    """Published ones hold a vision tower, which stays where it is."""
    base = stock_base("glm5_next_text", vocab_size=VOCABULARY)
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    whole = Glm5NextForConditionalGeneration(Glm5NextConfig(text_config=base.config.to_dict(), vision_config=vision)).eval()
    whole.model.language_model.load_state_dict(base.model.state_dict())
    whole.lm_head.load_state_dict(base.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = surgery.load(tmp_path)
    assert loaded.model.config.model_type == "glm5_next_text"
    loaded.model.set_experts_implementation("eager")
    assert_near(loaded.model(ids).logits, base(ids).logits, 1e-5)
    assert splice(loaded, Plan(sites=("L1.H1",))).mixer_at(1).graft.heads == [1]


def test_a_width_other_than_the_base_s_is_refused():
    with pytest.raises(UserError, match="as wide as the base's, 8, not 16"):
        splice(base_of("qwen3_next"), Plan(sites=("L0.H0",), width=16))


@torch.no_grad()
def test_pairs_of_a_group_can_be_shared(ids):
    """Four heads, two groups: two pairs; the same function."""
    base = base_of("qwen3_next")
    own, shared = (splice(base, Plan(sites=("L0.H0,1,2,3",), shared=share)) for share in (False, True))
    assert shared.mixer_at(0).graft.q_proj.weight.shape == (16, 32)
    assert own.mixer_at(0).graft.q_proj.weight.shape == (32, 32)
    assert_near(shared(ids).logits, own(ids).logits, 1e-12)


def alone(vocabulary: int = 50):
    """A model of Gated DeltaNet mixers alone, with a graft."""
    torch.manual_seed(0)
    fields = FIELDS | MODELS["qwen3_next"] | {"layer_types": ["linear_attention"] * 2, "vocab_size": vocabulary}
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **fields)).eval()
    with torch.no_grad():
        for mixer in (block.linear_attn for block in base.model.layers):
            mixer.in_proj_qkvz.weight.normal_(std=0.3)
    return base


@torch.no_grad()
@pytest.mark.usefixtures("in_float64")
def test_a_hybrid_without_attention_of_its_own_uses_a_cache(ids):
    """transformers 5.23 cannot say how long the cache of its base is."""
    base = alone().double()
    with pytest.raises(ValueError, match="only contain LinearAttention layers"):
        base(ids, use_cache=True)
    hybrid = splice(base, Plan(sites=("L1.H1",)))
    assert (decodes(base), decodes(hybrid)) == (False, True)  # bench times no token where the base has no cache
    prompt = hybrid(ids[:, :20], use_cache=True)
    steps = [hybrid(ids[:, t : t + 1], past_key_values=prompt.past_key_values, use_cache=True).logits for t in range(20, 30)]
    torch.testing.assert_close(torch.cat([prompt.logits, *steps], 1), hybrid(ids, use_cache=False).logits, **SAME)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :7] = 0
    options = {"max_new_tokens": 6, "do_sample": False}
    batch = hybrid.generate(ids.expand(2, -1) * mask, attention_mask=mask, **options)[:, 30:]
    assert torch.equal(batch[0], hybrid.generate(ids[:, 7:], **options)[0, 23:])
    assert torch.equal(batch[1], hybrid.generate(ids, use_cache=False, **options)[0, 30:])


def test_it_is_exported_and_proved(tokenizer, tmp_path):
    base = alone(VOCABULARY)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    assert surgery.export(splice(surgery.load(tmp_path / "base"), Plan(sites=("L1.H1",))), tmp_path / "hf").holds()
