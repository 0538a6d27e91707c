"""Layer grafts: equal to the donor's own layer. Donor heads in head grafts. Their laws stand in test_laws.py."""

import copy
from functools import partial

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.masking_utils import create_causal_mask

from surgery.errors import UserError
from surgery.families.mamba2 import Mamba2HybridConfig, Mamba2HybridForCausalLM
from surgery.hybrids.layer_graft import layer_spec
from surgery.kernels.attention import graft_attention
from surgery.models.anatomy import anatomy
from surgery.records.plan import Plan
from surgery.splicing.splice import graft_parameters, splice, unsplice
from tests.models import BASES, SAME, random_base

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
PARTIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
LONG = {
    "rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 1.0, "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8, "original_max_position_embeddings": 16,
}  # fmt: skip


def random_donor(config=LlamaConfig, hidden=64, **changes):
    """3 layers of 4 heads of 12 in 2 groups; random everywhere, the same weights every time."""
    torch.manual_seed(7)
    fields = {
        "vocab_size": 50, "hidden_size": hidden, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0,
        "eos_token_id": 0,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(config(**fields | changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3 if p.ndim == 1 else 1.2 / p.shape[-1] ** 0.5).add_(1.0 if p.ndim == 1 else 0.0)
    return model


DONORS = {
    "llama": random_donor,
    "llama 3 rope, biases": partial(random_donor, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True),
    "llama, yarn, every head its own keys": partial(random_donor, rope_parameters=YARN, num_key_value_heads=4),
    "mistral": partial(random_donor, MistralConfig, sliding_window=None),
    "qwen2": partial(random_donor, Qwen2Config),
    "qwen3": partial(random_donor, Qwen3Config),
    "phi3, partial rope": partial(random_donor, Phi3Config, rope_parameters=PARTIAL),
    "smollm3, no rope": partial(random_donor, SmolLM3Config, no_rope_layers=[1, 0, 1]),
}
PLAIN = Plan(kind="layer", sites=("L1",), donor="a donor")
WHOLE = PLAIN.model_copy(update={"mlp": True})
EVERY = Plan(kind="layer", sites=("L0", "L1", "L2"), donor="a donor", donor_layers={"L0": 2, "L2": 0}, mlp=True)


@pytest.fixture(params=DONORS, ids=lambda name: name.replace(",", "").replace(" ", "-"))
def donor(request):
    return DONORS[request.param]()


def from_donor(base, plan):
    return splice(base, plan, random_donor(hidden=base.config.hidden_size))


def as_in_mamba2attn():
    """An attention layer as in state-spaces' mamba2attn-2.7b: convolution of q, k and v, RoPE on a part of every head."""
    stock = random_base()
    graft = layer_spec(1, 4, 16, num_key_value_heads=2, rope={"dim": 8, "theta": 10000.0}, conv=4, bias=["qkv_conv"])
    own = ("model_type", "layer_types", "architectures")
    fields = {name: value for name, value in stock.config.to_dict().items() if name not in own}
    torch.manual_seed(0)
    return Mamba2HybridForCausalLM(Mamba2HybridConfig(**fields, grafts=[graft])).eval()


HYBRIDS = {
    "mamba2": lambda: from_donor(random_base(n_groups=2), PLAIN),
    "mamba2, mlp": lambda: from_donor(random_base(), WHOLE),
    "mamba2, at random": lambda: splice(random_base(), Plan(kind="layer", sites=("L0", "L2"), width=16)),
    "mamba2attn": as_in_mamba2attn,
    "mamba, mlp": lambda: from_donor(BASES["mamba"](), WHOLE),
    "falcon mamba, mlp": lambda: from_donor(BASES["falcon mamba"](), WHOLE),
    "llamba": lambda: from_donor(BASES["llamba"](), PLAIN),
    "llamba, mlp": lambda: from_donor(BASES["llamba"](), WHOLE),
}


def donors_own(donor, index, hidden, mask=None, *, whole):
    """What the donor's layer makes of hidden states: all of it, or its attention alone."""
    places = torch.arange(hidden.shape[1])[None] if mask is None else (mask.cumsum(-1) - 1).clamp_min(0)
    causal = create_causal_mask(config=donor.config, inputs_embeds=hidden, attention_mask=mask, past_key_values=None)
    layer = donor.model.layers[index]
    options = {"position_embeddings": donor.model.rotary_emb(hidden, places), "attention_mask": causal}
    return layer(hidden, **options) if whole else layer.self_attn(hidden, **options)[0]


def states(size=64):
    return torch.randn(2, 23, size, generator=torch.Generator().manual_seed(3))


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("whole", [False, True])
@torch.no_grad()
def test_it_is_the_donors_layer(donor, whole):
    """On the same hidden states: at once, padded on the left, and in pieces from a cache."""
    hybrid = splice(random_base(), Plan(kind="layer", sites=("L0",), donor="x", donor_layers={"L0": 1}, mlp=whole), donor)
    mixer, hidden = hybrid.backbone.layers[0].mixer, states()
    graft = mixer.block if whole else mixer
    wanted = donors_own(donor, 1, hidden, whole=whole)
    assert (wanted - wanted.mean(1, keepdim=True)).abs().max() > 0.1  # a layer that mixes
    torch.testing.assert_close(graft(hidden), wanted, **SAME)

    mask = torch.ones(2, 23, dtype=torch.long)
    mask[0, :6] = 0
    padded = graft(hidden, attention_mask=mask)
    wanted_padded = donors_own(donor, 1, hidden, mask, whole=whole)
    torch.testing.assert_close(padded[mask.bool()], wanted_padded[mask.bool()], **SAME)

    cache = DynamicCache(config=hybrid.config)
    pieces = [graft(piece, cache_params=cache) for piece in hidden.split([9, 1, 1, 12], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), wanted, **SAME)


@pytest.mark.usefixtures("in_float64")
def test_the_convolution_is_the_equation():
    """q, k and v of a token are sums over the last four, channel by channel; then q and k turn."""
    graft = as_in_mamba2attn().backbone.layers[1].mixer.graft
    hidden = states()
    flat = torch.cat([proj(hidden) for proj in (graft.q_proj, graft.k_proj, graft.v_proj)], -1)
    earlier = torch.cat([torch.zeros(2, 3, flat.shape[-1]), flat], 1)
    rows = sum(earlier[:, i : i + 23] * graft.qkv_conv.weight[:, 0, i] for i in range(4)) + graft.qkv_conv.bias
    v = rows[..., -32:].view(2, 23, 2, 16).transpose(1, 2)
    torch.testing.assert_close(graft.project(hidden)[2], v, **SAME)
    k, straight = graft.project(hidden)[1], rows[..., 64:96].view(2, 23, 2, 16).transpose(1, 2)
    torch.testing.assert_close(k[..., 8:], straight[..., 8:], **SAME)  # not turned
    turn = torch.arange(23)[:, None] * 10000.0 ** (-torch.arange(4) / 4)
    torch.testing.assert_close(k[..., :4], straight[..., :4] * turn.cos() - straight[..., 4:8] * turn.sin(), **SAME)


@pytest.mark.usefixtures("in_float64")
def test_without_the_mlp_the_blocks_own_norm_stays(tokens):
    base, donor = random_base(), random_donor()
    block = splice(base, PLAIN, donor).backbone.layers[1]
    hidden = states()
    assert block.norm.weight is base.backbone.layers[1].norm.weight
    wanted = hidden + donors_own(donor, 1, block.norm(hidden), whole=False)
    torch.testing.assert_close(block(hidden), wanted, **SAME)


@pytest.mark.usefixtures("in_float64")
def test_positions_count_from_the_first_real_token_unless_they_are_given(tokens):
    hybrid = from_donor(random_base(), PLAIN)
    mask, place = torch.ones_like(tokens), torch.arange(37)[None]
    mask[0, :6] = 0
    counted, given = (
        hybrid(tokens, attention_mask=mask, position_ids=places).logits for places in (None, (mask.cumsum(-1) - 1).clamp_min(0))
    )
    assert torch.equal(counted, given)
    plain = hybrid(tokens).logits
    torch.testing.assert_close(hybrid(tokens, position_ids=place + 5).logits, plain, **SAME)  # RoPE is relative
    assert (hybrid(tokens, position_ids=place * 3).logits - plain).abs().max() > 1e-3


@pytest.mark.parametrize("plan", [PLAIN, EVERY, Plan(kind="layer", sites=("L2",))], ids=["plain", "all", "random"])
@pytest.mark.parametrize("name", ["mamba, biases, untied", "llamba"])
def test_unsplice_restores_the_base_bit_for_bit(name, plan, tokens):
    base = BASES[name]()
    before, logits = copy.deepcopy(base.state_dict()), base(tokens).logits
    hybrid = splice(base, plan, random_donor(hidden=base.config.hidden_size) if plan.init == "donor" else None)
    with torch.no_grad():
        for p in graft_parameters(hybrid).values():
            p.add_(1)
    for restored in (unsplice(hybrid), unsplice(copy.deepcopy(hybrid))):
        assert type(restored) is type(base)
        assert restored.state_dict().keys() == before.keys()
        assert all(torch.equal(tensor, before[name]) for name, tensor in restored.state_dict().items())
        assert restored.config.to_dict() == base.config.to_dict()
        assert torch.equal(restored(tokens).logits, logits)
    assert all(p is q for p, q in zip(unsplice(hybrid).parameters(), base.parameters(), strict=True))


def test_what_was_replaced_goes_where_the_hybrid_goes(tokens):
    hybrid = from_donor(random_base(), WHOLE).double()
    assert {p.dtype for p in unsplice(hybrid).parameters()} == {torch.float64}
    assert not [name for name in hybrid.state_dict() if "removed" in name or "layers.1.mixer.in_proj" in name]


def test_unsplice_after_a_reload_says_to_load_the_base(tmp_path):
    from_donor(random_base(), PLAIN).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"does not hold what a layer graft replaced \('backbone.layers.1.mixer.*load the base"):
        unsplice(AutoModelForCausalLM.from_pretrained(tmp_path))


def test_a_splice_shares_the_base_and_copies_the_donor():
    base, donor = random_base(), random_donor()
    hybrid = splice(base, WHOLE, donor)
    shared, donors = dict(base.named_parameters()), {p.data_ptr() for p in donor.parameters()}
    for name, p in hybrid.named_parameters():
        assert p is shared[name] if name in shared else ".layers.1.mixer.graft." in name and p.data_ptr() not in donors


def test_anatomy_finds_its_heads():
    found = anatomy(from_donor(random_base(), PLAIN))
    assert found.kinds() == "0 ssm, 1 attention, 2 ssm"
    assert (found.heads(1), found.mixers[1].width) == (4, 12)


@pytest.mark.usefixtures("in_float64")
@torch.no_grad()
def test_a_token_from_the_cache_attends_as_in_the_whole():
    """Decoding puts the queries of a group side by side instead of copying keys."""
    graft = from_donor(random_base(), PLAIN).backbone.layers[1].mixer.graft
    q, k, v = graft.project(states())
    exist = torch.ones(2, 23, dtype=torch.bool)
    exist[0, :6] = False
    pairs = exist[:, None, None] & torch.ones(23, 23, dtype=torch.bool).tril()
    for mask, of_last in ((None, None), (exist, exist), (pairs, pairs[:, :, -1:])):
        wanted = graft_attention(q, graft.per_head(k), graft.per_head(v), mask)[:, -1:]
        torch.testing.assert_close(graft.attend(q[:, :, -1:], k, v, of_last), wanted, **SAME)


@pytest.mark.usefixtures("in_float64")
def test_matrices_are_the_attention_that_is_computed():
    mixer, hidden = from_donor(random_base(), PLAIN).backbone.layers[1].mixer, states()[:1]
    v = mixer.graft.per_head(mixer.graft.project(hidden)[2])
    y = (mixer.matrices(hidden) @ v[0]).transpose(0, 1).flatten(-2)
    torch.testing.assert_close(mixer.o_proj(y), mixer(hidden)[0], **SAME)
    torch.testing.assert_close(mixer.matrices(hidden, torch.tensor([4, 22])), mixer.matrices(hidden)[:, [4, 22]], **SAME)


def test_a_donor_in_bfloat16_keeps_its_frequencies():
    exact, rounded = (
        splice(random_base(), PLAIN, donor).config.grafts for donor in (random_donor(), random_donor().bfloat16())
    )
    assert exact == rounded


def broken(donor, **changes):
    for name, value in changes.items():
        setattr(donor.model.layers[1].self_attn.q_proj, name, value)
    return donor


@pytest.mark.parametrize(
    ("donor", "plan", "complaint"),
    [
        (partial(random_donor, hidden=48), PLAIN, "hidden size is 48, the base's 64"),
        (partial(random_donor, MistralConfig), PLAIN, "last 4096 tokens only"),
        (partial(random_donor, Gemma2Config), PLAIN, "gemma2 model cannot be a donor, because .*soft-capped"),
        (random_base, PLAIN, "a mamba2 model cannot be a donor; donors are llama, "),
        (random_donor, Plan(kind="layer", sites=("L1",), donor="x", donor_layers={"L1": 3}), "no layer 3: it has layers 0-2"),
        (partial(random_donor, Phi3Config, head_dim=16, rope_parameters=LONG), PLAIN, "'longrope'.* changes with the length"),
        (lambda: broken(random_donor(), weight=nn.Parameter(torch.zeros(48, 64).char(), False)), PLAIN, "is quantised"),
        (lambda: None, PLAIN, r"start from a donor \(a donor\), and none is given"),
        (random_donor, Plan(sites=("L1.H3",)), "a donor is given, but the plan's grafts start dual"),
        (lambda: None, Plan(kind="layer", sites=("L1",), width=24), "width 24 do not divide the base's hidden size, 64"),
        (random_donor, Plan(kind="layer", sites=("L3",), donor="x"), "no site L3"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(donor, plan, complaint):
    with pytest.raises(UserError, match=complaint) as error:
        splice(random_base(), plan, donor())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"kind": "layer", "sites": ["L1.H3"]}, "L1.H3 names heads; a layer graft takes a whole layer, e.g. L1"),
        ({"sites": ["L1"]}, "names no heads"),
        ({"kind": "layer", "sites": ["L1"], "init": "dual"}, "a layer graft starts donor or random, not dual"),
        ({"kind": "layer", "sites": ["L1"], "blend": 0.0}, "blend: means nothing for a layer graft"),
        ({"kind": "layer", "sites": ["L1"], "donor": "x", "donor_layers": {"L2": 0}}, "L2 is not among the sites"),
        ({"sites": ["L1.H0"], "donor": "x", "donor_heads": {"L1.H0": "L2.H0"}}, "donor_heads: went with version 0.22"),
    ],
)
def test_plans_that_would_not_be_obeyed_are_refused(fields, complaint):
    with pytest.raises(ValidationError, match=complaint):
        Plan.model_validate(fields)


def test_plans_survive_json(tmp_path):
    EVERY.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == EVERY


def test_defaults_of_a_plan():
    assert PLAIN.init == "donor"
    assert Plan(kind="layer", sites=("L2", "L0")).init == "random"
    assert [EVERY.donor_layer(layer) for layer in range(3)] == [2, 1, 0]
    assert Plan(sites=("L1.H3",)).time_step
