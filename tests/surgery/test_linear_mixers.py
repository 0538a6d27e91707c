"""What is mLSTM's and Lightning attention's own; the laws of all families inside stock models are in test_laws.py."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MiniMaxConfig, xLSTMConfig
from transformers.initialization import no_init_weights

from surgery.errors import UserError
from surgery.kernels.dispatch import OPERATIONS, use
from surgery.kernels.lightning import lightning_scan
from surgery.kernels.mlstm import mlstm_scan
from surgery.pretraining.mixer_starts import start_mixers
from surgery.records.plan import Plan
from surgery.splicing.splice import adopt, splice, unsplice
from tests.kernels.inputs import assert_near
from tests.models import SAME
from tests.surgery.mixer_checks import entering

COMMON = {
    "vocab_size": 50,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": None,
}
MINIMAX = {"layer_types": ["linear_attention", "full_attention"]}
CONFIGURATIONS = {
    "xlstm": lambda **more: xLSTMConfig(**COMMON, num_heads=4, qk_dim_factor=1.0, chunk_size=8, **more),
    "minimax": lambda **more: MiniMaxConfig(
        **COMMON | MINIMAX | more, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        block_size=8, num_local_experts=2, num_experts_per_tok=1,
    ),
}  # fmt: skip
every_model = pytest.mark.parametrize("name", CONFIGURATIONS)


def base_of(name, **more):
    """In float64; all that stands in front of its mixers' functions is large enough to matter."""
    torch.manual_seed(0)
    with no_init_weights():  # transformers 5.23 cannot start the fused weights of xLSTM
        base = AutoModelForCausalLM.from_config(CONFIGURATIONS[name](**more)).double().eval()
    start_mixers(base)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, p in base.named_parameters():
            if p.dim() > 1 or (more.get("use_bias") and parameter_name.endswith("bias")):
                p.copy_(torch.randn(p.shape, generator=g) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3))
    base.set_experts_implementation("eager")
    return base


@pytest.fixture
def ids():
    return torch.randint(1, 50, (1, 30), generator=torch.Generator().manual_seed(0))


def softmax(scores):
    return scores.masked_fill(torch.ones(30, 30).triu(1).bool(), -torch.inf).softmax(-1)


HEADS, SIGNS, TAUS = [0, 3], [1, -1], [1.0, 0.5]
STARTS = {f"L0.H{h}": {"sign": s, "tau": tau} for h, s, tau in zip(HEADS, SIGNS, TAUS, strict=True)}
CHOSEN = list(zip(HEADS, SIGNS, TAUS, strict=True))


@pytest.mark.usefixtures("in_float64")
@torch.no_grad()
@pytest.mark.parametrize("more", [{}, {"use_bias": True}, {"weight_mode": "fused"}], ids=["single", "biases", "fused"])
def test_a_dual_graft_of_mlstm_is_softmax_of_the_base_s_own_scores(more, ids):
    """From the mixer's parts, step by step, as derivations.md has it."""
    hybrid = splice(base_of("xlstm", **more), Plan(sites=("L0.H0,3",), starts=STARTS))
    mixer, u = hybrid.mixer_at(0), entering(hybrid, ids)
    projected = mixer.project(u)
    v, k, q, write, forget = (getattr(projected, part) for part in ("values", "keys", "queries", "write", "forget"))
    y = mixer.mix(projected)
    assert_near(y[:, :, [1, 2]], mlstm_scan(q, k, v, write, forget)[0][:, :, [1, 2]], 1e-12)
    for head, sign, tau in CHOSEN:
        scores = sign * tau * q[0, :, head] @ k[0, :, head].T / 16**0.5 + write[0, :, head]
        assert_near(y[0, :, head], sign * softmax(scores) @ v[0, :, head], 1e-10)
    assert_near(mixer.finish(y, projected.gate), mixer(u)[0], 1e-12)


@pytest.mark.usefixtures("in_float64")
@torch.no_grad()
def test_a_dual_graft_of_lightning_is_softmax_of_the_size_of_the_sum(ids):
    hybrid = splice(base_of("minimax"), Plan(sites=("L0.H0,3",), starts=STARTS))
    mixer, u = hybrid.mixer_at(0), entering(hybrid, ids)
    projected = mixer.project(u)
    v, k, q = projected.values, projected.keys, projected.queries
    y = mixer.mix(projected)
    assert_near(y[:, :, [1, 2]], lightning_scan(q, k, v, mixer.slope)[0][:, :, [1, 2]], 1e-12)
    distance = torch.arange(30)[:, None] - torch.arange(30)
    for head, sign, tau in CHOSEN:
        scores = q[0, :, head] @ k[0, :, head].T
        weights = (scores * (-mixer.slope[head] * distance.clamp_min(0)).exp()).tril()
        attention = softmax(sign * tau * scores)
        assert_near(y[0, :, head], sign * weights.sum(-1, keepdim=True).abs() * (attention @ v[0, :, head]), 1e-10)
    assert_near(mixer.finish(y, projected.gate), mixer(u)[0], 1e-12)


@every_model
def test_a_width_other_than_the_base_s_is_refused(name):
    with pytest.raises(UserError, match=r"as wide as the base's, 16, not 24"):
        splice(base_of(name), Plan(sites=("L0.H0",), width=24))


def test_gates_beyond_what_the_kernel_takes_are_refused():
    with pytest.raises(UserError, match="gate_soft_cap 30, and this model has 40"):
        splice(base_of("xlstm", gate_soft_cap=40.0), Plan(sites=("L0.H0",)))


@torch.no_grad()
def test_an_adopted_xlstm_with_fused_weights_is_the_stock_one(ids):
    """Bit for bit, with stock kernels, as every family is in test_laws.py; a closed gate, too."""
    base = base_of("xlstm", weight_mode="fused", use_bias=True).float()
    with use(**{operation: "stock" for operation in OPERATIONS if operation != "graft_attention"}):
        for model in (adopt(base), splice(base, Plan(sites=("L0.H0,2",), blend=0.0)).eval()):
            assert torch.equal(model(ids).logits, base(ids).logits)


@pytest.mark.usefixtures("in_float64")
@torch.no_grad()
def test_an_adopted_xlstm_minds_padding_and_keeps_logits():
    """What transformers' own class does not: rows beside padding, beams, and the logits of some tokens alone."""
    model = adopt(base_of("xlstm"))
    ids = torch.randint(1, 50, (2, 20), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    logits = model(ids * mask, attention_mask=mask).logits
    torch.testing.assert_close(logits[:1, 7:], model(ids[:1, 7:]).logits, **SAME)
    assert torch.equal(model(ids, logits_to_keep=2).logits, model(ids).logits[:, -2:])
    states = model(ids, output_hidden_states=True).hidden_states
    assert [tuple(m.shape) for m in states] == [(2, 20, 64)] * 3
    assert torch.equal(model.lm_head(states[-1]), model.lm_head(model.backbone(ids).last_hidden_state))
    options = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2}
    beams = model.generate(ids * mask, attention_mask=mask, **options)[0, 20:]
    assert torch.equal(beams, model.generate(ids[:1, 7:], **options)[0, 13:])
    assert type(unsplice(model)).__module__.startswith("transformers.")


@pytest.mark.usefixtures("in_float64")
@torch.no_grad()
def test_layers_of_minimax_that_stay_stock_share_the_cache(ids):
    """A grafted layer between two that are not, by beams, beside padding."""
    base = base_of("minimax", num_hidden_layers=3, layer_types=["linear_attention"] * 3)
    hybrid = splice(base, Plan(sites=("L1.H1",)))
    assert hybrid.mixer_at(0).__class__.__module__.startswith("transformers.")
    prompt = hybrid(ids[:, :20], use_cache=True)
    steps = [hybrid(ids[:, t : t + 1], past_key_values=prompt.past_key_values, use_cache=True).logits for t in range(20, 30)]
    torch.testing.assert_close(torch.cat([prompt.logits, *steps], 1), hybrid(ids).logits, **SAME)
    assert int(prompt.past_key_values.get_seq_length()) == 30
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :7] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "num_beams": 3}
    beams = hybrid.generate(ids.expand(2, -1) * mask, attention_mask=mask, **options)[0, 30:]
    assert torch.equal(beams, hybrid.generate(ids[:, 7:], **options)[0, 23:])


@every_model
def test_fresh_mixers_start_where_something_is_learnt_from(name):
    """Projections keep the size of what they are given; a head of mLSTM writes as much as it is given, and forgets slowly."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGURATIONS[name]())
    before = {name: p.clone() for name, p in model.named_parameters()}
    start_mixers(model)
    mixer = model.backbone.blocks[0].mlstm_layer if name == "xlstm" else model.model.layers[0].self_attn
    gain = mixer(torch.randn(1, 1, 64), *[None] * (2 * (name == "minimax")))[0].std()
    assert gain > 0.05
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert all("mlstm_layer" in name or "self_attn" in name for name in changed)
    if name == "xlstm":
        assert not mixer.igate_preact.bias.any()
        assert mixer.fgate_preact.bias.sigmoid().diff().min() > 0
