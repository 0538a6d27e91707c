"""Hybrids made inside stock models: the laws of splicing, for every family whose mixers stand among other layers."""

from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    BailingHybridConfig,
    BambaConfig,
    FalconH1Config,
    Glm5NextTextConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    MiniMaxConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen4ExpTextConfig,
    Zamba2Config,
    xLSTMConfig,
)

import surgery
from surgery.doctor.examination import examine
from surgery.errors import UserError
from surgery.families import families
from surgery.kernels.dispatch import use
from surgery.locating.locate import locate
from surgery.locating.planning import plan as plan_from
from surgery.locating.planning import random_plan
from surgery.models.anatomy import anatomy
from surgery.records.plan import Plan
from surgery.records.sections.tuning import Align
from surgery.splicing.splice import adopt, graft_parameters, splice, stock, unsplice
from surgery.tuning.distil import Distillation
from surgery.tuning.loop import tune
from surgery.tuning.partial_run import PartialRun
from surgery.tuning.sequences import IGNORE
from surgery.tuning.trainable import trainable, training
from tests.conftest import SAME, VOCABULARY, but_slow
from tests.surgery.test_layer_graft import random_donor
from tests.surgery.test_tune import SHORT

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SSM = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
EXPERTS = {"num_experts_per_tok": 2}
DELTA = {
    "num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
LATENT = {  # attention, and layers with experts
    "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_local_experts": 4,
    "moe_intermediate_size": 16, "mlp_layer_types": ["dense", "sparse", "dense"],
}  # fmt: skip
KDA = {"num_hidden_layers": 3, "layer_types": DELTA["layer_types"], "linear_num_heads": 4, "linear_head_dim": 8}

# Three or four layers each; in all of them L1 has an SSM, and so has the last.
CONFIGURATIONS = {
    "bamba": lambda: BambaConfig(**SIZES, **SSM, num_hidden_layers=3, attn_layer_indices=[0]),
    "nemotron_h": lambda: NemotronHConfig(
        **SIZES, head_dim=8, layers_block_type=["full_attention", "linear_attention", "moe", "linear_attention"],
        mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=2, chunk_size=8, n_routed_experts=4,
        moe_intermediate_size=16, moe_shared_expert_intermediate_size=16, time_step_min=1e-30, **EXPERTS,
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **SIZES, **SSM, num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "linear_attention"],
        num_local_experts=4, shared_intermediate_size=16, residual_multiplier=0.5, logits_scaling=2.0,
        position_embedding_type="rope", **EXPERTS,
    ),
    "falcon_h1": lambda: FalconH1Config(
        **SIZES, **SSM, num_hidden_layers=2, mamba_d_ssm=64, mamba_rms_norm=True, ssm_in_multiplier=0.7,
        ssm_out_multiplier=1.3, ssm_multipliers=[0.5, 0.8, 1.1, 1.4, 0.9], mamba_proj_bias=True,
    ),
    "falcon_h1, no norm": lambda: FalconH1Config(
        **SIZES, **SSM, num_hidden_layers=2, mamba_d_ssm=64, mamba_rms_norm=False, ssm_multipliers=[0.5, 0.8, 1.1, 1.4, 0.9],
    ),
    "zamba2": lambda: Zamba2Config(
        **SIZES | {"num_key_value_heads": 4}, num_hidden_layers=5,
        layers_block_type=["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
        num_mem_blocks=2, n_mamba_heads=4, mamba_d_state=8, mamba_ngroups=2, chunk_size=8, use_shared_attention_adapter=True,
        adapter_rank=4, use_mem_rope=True, time_step_min=1e-30,
    ),
    "jamba": lambda: JambaConfig(
        **SIZES, num_hidden_layers=3, attn_layer_period=4, attn_layer_offset=0, expert_layer_period=2, expert_layer_offset=1,
        num_experts=4, mamba_d_state=8, mamba_dt_rank=4, **EXPERTS,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **SIZES, **DELTA, head_dim=8, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, **EXPERTS,
    ),
    "qwen3_5_text": lambda: Qwen3_5TextConfig(**SIZES, **DELTA, head_dim=8),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeTextConfig(
        **SIZES, **DELTA, head_dim=8, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, **EXPERTS,
    ),
    "olmo_hybrid": lambda: OlmoHybridConfig(**SIZES, **DELTA),
    "qwen4_exp_text": lambda: Qwen4ExpTextConfig(
        **SIZES | {"eos_token_id": 98}, **DELTA, head_dim=8, num_experts=4, moe_intermediate_size=16, hc_count=2, hc_lowrank=8,
        shared_expert_intermediate_size=16, ple_layer_ids=[2], heads_per_ngram=2, ngram_vocab_size_base=50,
        split_ngram_parts=2, make_ngram_vocab_size_divisible_by=2, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8,
        indexer_budget=16, indexer_compress_ratio=4, **EXPERTS,
    ),
    "kimi_linear": lambda: KimiLinearConfig(**SIZES | KDA | LATENT, qk_rope_head_dim=4, **EXPERTS),
    "bailing_hybrid": lambda: BailingHybridConfig(
        **SIZES | LATENT, num_hidden_layers=3, layer_types=DELTA["layer_types"], head_dim=8, qk_rope_head_dim=4, n_group=2,
        topk_group=1, **EXPERTS,
    ),
    "glm5_next_text": lambda: Glm5NextTextConfig(
        **SIZES | KDA | LATENT, q_lora_rank=8, index_topk=16, index_kpool=4, index_head_dim=8, index_n_heads=2, hc_mult=2,
        **EXPERTS,
    ),
    "xlstm": lambda: xLSTMConfig(  # of other widths than multiples of 64 transformers 5.23 cannot make the cache
        **SIZES | {"hidden_size": 64}, num_hidden_layers=3, num_heads=4, qk_dim_factor=1.0, chunk_size=8,
    ),
    "minimax": lambda: MiniMaxConfig(
        **SIZES, num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "linear_attention"], head_dim=8,
        num_local_experts=4, block_size=16, **EXPERTS,
    ),
}  # fmt: skip
KINDS = [name for name in CONFIGURATIONS if "," not in name]
STOCK = {
    "ssd_scan": "stock",
    "ssd_step": "stock",
    "selective_scan": "stock",
    "selective_step": "stock",
    "causal_conv": "stock",
    "rms_norm": "stock",
    "delta_rule": "stock",
    "delta_step": "stock",
    "mlstm_scan": "stock",
    "lightning_scan": "stock",
}
ADOPTED = ("xlstm", "kimi_linear", "bailing_hybrid", "glm5_next_text")  # all of whose mixers become ours

PROJECTIONS = "in_proj x_proj in_proj_qkvz in_proj_qkv q_proj k_proj v_proj q k v igate_preact fgate_preact qkv_proj"


def base_of(name: str, **changes) -> PreTrainedModel:
    """The same weights every time."""
    config = CONFIGURATIONS[name]()
    for field, value in changes.items():
        setattr(config, field, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.set_experts_implementation("eager")  # the others know no float64
    with torch.no_grad():  # as initialised, mixers do next to nothing, and the norms of Jamba have no weights
        for mixer in anatomy(model).ssms:
            for part in PROJECTIONS.split():
                if hasattr(mixer.module, part):
                    getattr(mixer.module, part).weight.normal_(std=0.3)
            if hasattr(mixer.module, "igate_preact"):
                mixer.module.igate_preact.bias.zero_()
            for part in ("b_layernorm", "c_layernorm"):
                if hasattr(mixer.module, part):
                    getattr(mixer.module, part).weight.uniform_(0.5, 2)
    return model


def over(names):
    return pytest.mark.parametrize("base", names, ids=lambda name: name.replace(",", "").replace(" ", "-"), indirect=True)


@pytest.fixture
def base(request) -> PreTrainedModel:
    return base_of(request.param)


every_kind = over(CONFIGURATIONS)
some_kinds = over(but_slow(CONFIGURATIONS, "falcon_h1", "zamba2", "jamba", "qwen3_next"))
OWN_TESTS = (  # of how their grafts start
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid",
    "glm5_next_text", "xlstm", "minimax",
)  # fmt: skip
mambas = [name for name in CONFIGURATIONS if name not in OWN_TESTS]


def plan_for(base: PreTrainedModel, **fields) -> Plan:
    """Two heads of L1 and one of the last layer, or, where that is L1, of the first."""
    last = len(anatomy(base).blocks) - 1
    return Plan(sites=("L1.H0,3", f"L{last if last > 1 else 0}.H2"), **fields)


def in_steps(model, ids, positions, mask=None, first=20):
    """The logits of a prompt, of several tokens that follow, and of single ones, all from one cache."""
    cache, parts, t = None, [], ids.shape[1]
    stops = [0, first, *range(first + 1, t + 1)]
    for begin, end in pairwise(stops):
        seen = None if mask is None else mask[:, :end]
        output = model(
            ids[:, begin:end], position_ids=positions[:, begin:end], attention_mask=seen, past_key_values=cache, use_cache=True
        )
        cache, parts = output.past_key_values, [*parts, output.logits]
    return torch.cat(parts, 1)


def test_every_stock_family_is_here():
    stock = {name for name, family in families().items() if family.fields is None and name == family.model_type}
    assert {make().model_type for make in CONFIGURATIONS.values()} == stock


@every_kind
@torch.no_grad()
def test_nothing_is_changed_by_a_graft_that_does_nothing(base, tokens):
    """Bit for bit, with stock kernels: nothing spliced, gates at 0, grafts off, grafts taken out."""
    stock, adopted = base(tokens).logits, adopt(base)
    assert (adopted is base) == (base.config.model_type not in ADOPTED)
    with use(**STOCK):
        assert torch.equal(adopted(tokens).logits, stock)
    hybrid, plain = splice(base, plan_for(base)), adopted(tokens).logits
    assert (hybrid(tokens).logits - stock).abs().max() > 1e-3
    with hybrid.disable_grafts():
        assert torch.equal(hybrid(tokens).logits, plain)
    taken_out = unsplice(hybrid)
    assert type(taken_out) is type(base)
    assert torch.equal(taken_out(tokens).logits, stock)
    assert all(p is q for p, q in zip(taken_out.parameters(), base.parameters(), strict=True))
    with use(**STOCK):
        gated = splice(base, plan_for(base, blend=0.0))
        assert torch.equal(gated(tokens).logits, stock)


@every_kind
@torch.no_grad()
@pytest.mark.usefixtures("in_float64")
def test_cached_is_uncached_and_padded_is_single(base, tokens):
    assert_alike(splice(base.double(), plan_for(base)), tokens)


@over(but_slow(CONFIGURATIONS, "bamba", "xlstm"))
@torch.no_grad()
@pytest.mark.usefixtures("in_float64")
def test_a_layer_graft_in_a_stock_block(base, tokens, tmp_path):
    """Of a donor with positions: cached, padded, saved, switched off, taken out."""
    layer = anatomy(base.double()).ssms[-1].layer
    plan = Plan(kind="layer", sites=(f"L{layer}",), donor="x", donor_layers={f"L{layer}": 1})
    hybrid = splice(base, plan, random_donor(hidden=base.config.hidden_size).double())
    logits, plain = hybrid(tokens).logits, base(tokens).logits
    assert (logits - plain).abs().max() > 1e-3
    assert_alike(hybrid, tokens)
    with hybrid.disable_grafts():
        torch.testing.assert_close(hybrid(tokens).logits, plain, **SAME)
    hybrid.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    again.set_experts_implementation("eager")
    torch.testing.assert_close(again(tokens).logits, logits, **SAME)
    taken_out = unsplice(hybrid)
    assert all(p is q for p, q in zip(taken_out.parameters(), base.parameters(), strict=True))
    torch.testing.assert_close(taken_out(tokens).logits, plain, **SAME)


@over(["bamba", "jamba"])
@torch.no_grad()
@pytest.mark.usefixtures("in_float64")
def test_so_it_is_half_blended_and_without_time_step(base, tokens):
    assert_alike(splice(base.double(), plan_for(base, time_step=False, blend=0.5)), tokens)


def assert_alike(hybrid, tokens):
    expected, positions = hybrid(tokens).logits, torch.arange(tokens.shape[1]).expand_as(tokens)
    torch.testing.assert_close(in_steps(hybrid, tokens, positions), expected, **SAME)
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    padded, positions = tokens * mask, (mask.cumsum(-1) - 1).clamp_min(0)
    alone = hybrid(tokens[:1, 9:]).logits
    for logits in (
        hybrid(padded, attention_mask=mask, position_ids=positions).logits,
        in_steps(hybrid, padded, positions, mask),
    ):
        torch.testing.assert_close(logits[:1, 9:], alone, **SAME)
        torch.testing.assert_close(logits[1], expected[1], **SAME)


@torch.no_grad()
@pytest.mark.usefixtures("in_float64")
def test_several_tokens_continue_from_a_cache(tokens):
    """In Mamba-2 mixers; Mamba-1's stock ones, of the other layers, lose their state there."""
    hybrid = splice(base_of("bamba").double(), plan_for(base_of("bamba")))
    positions = torch.arange(37)[None].expand_as(tokens)
    first = hybrid(tokens[:, :15], position_ids=positions[:, :15], use_cache=True)
    more = hybrid(tokens[:, 15:], position_ids=positions[:, 15:], past_key_values=first.past_key_values)
    torch.testing.assert_close(more.logits, hybrid(tokens).logits[:, 15:], **SAME)


@over(but_slow(mambas, "falcon_h1", "zamba2", "jamba"))
@pytest.mark.usefixtures("in_float64")
def test_the_start_is_the_heads_own_query_and_key(base):
    """Without decay the SSM of a head is linear attention with the graft's queries and keys."""
    hybrid = splice(base.double(), plan_for(base, width=8, time_step=False))
    mixer = hybrid.mixer_at(1)
    u = torch.randn(1, 11, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        mixer.A_log.fill_(-40)  # A is 0
        matrix = family_matrix(mixer, u)
        projected = mixer.project(u)
        of_channels = base.config.model_type == "jamba"  # whose queries and keys are made of the values
        q, k = mixer.queries_and_keys(projected.values[..., 0] if of_channels else projected)
        scores = (q @ k.transpose(-1, -2))[0].tril() * projected.dt[0, :, mixer.graft.heads].T[:, None]
        torch.testing.assert_close(scores, matrix, **SAME)


@over([name for name in mambas if name != "jamba"])
def test_an_induction_head_looks_behind_the_same_token(base):
    """Also where the mixer scales its input first, as Falcon-H1's does."""
    if base.config.model_type == "falcon_h1":
        base.config.ssm_in_multiplier = 0.1
        base = AutoModelForCausalLM.from_config(base.config).eval()
    layer = anatomy(base).ssms[0].layer
    hybrid = splice(base, Plan(sites=(f"L{layer}.H1",), init="induction", time_step=False)).eval()
    mixer, seen = hybrid.mixer_at(layer), []
    mixer.register_forward_pre_hook(lambda _, a, k: seen.append(a[0] if a else k["hidden_states"]), with_kwargs=True)
    first = torch.randperm(base.config.vocab_size, generator=torch.Generator().manual_seed(0))[:16]
    with torch.no_grad():
        hybrid(input_ids=torch.cat([first, first])[None], use_cache=False)
        matrix = mixer.matrices(seen[0])[1]
    asked = torch.arange(16, 31)
    behind = matrix[asked, asked - 16 + 1]
    assert (behind == matrix[asked].max(1).values).double().mean() > 0.9
    assert behind.mean() > 0.3


def family_matrix(mixer, u):
    graft, mixer.graft = mixer.graft, None
    matrix = mixer.matrices(u, heads=graft.heads)
    mixer.graft = graft
    return matrix


@some_kinds
def test_generating_a_padded_batch(base, tokens):
    """Greedily, by beams that are reordered, and with a static cache."""
    hybrid = splice(base, plan_for(base))
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    options = {"max_new_tokens": 6, "do_sample": False}
    batch = hybrid.generate(tokens * mask, attention_mask=mask, **options)[:, 37:]
    assert torch.equal(batch[0], hybrid.generate(tokens[:1, 9:], **options)[0, 28:])
    beams = hybrid.generate(tokens * mask, attention_mask=mask, num_beams=2, **options)[0, 37:]
    assert torch.equal(beams, hybrid.generate(tokens[:1, 9:], num_beams=2, **options)[0, 28:])


def test_a_static_cache(tokens):
    hybrid = splice(base_of("bamba"), plan_for(base_of("bamba")))
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    static = hybrid.generate(tokens * mask, cache_implementation="static", **options)
    assert torch.equal(static, hybrid.generate(tokens * mask, **options))


@some_kinds
def test_gradients_reach_the_grafts_alone_also_with_checkpointing(base, tokens):
    hybrid = splice(base, plan_for(base)).train()
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            hybrid.gradient_checkpointing_enable()
        hybrid.zero_grad()
        losses = [hybrid(tokens, attention_mask=m, labels=tokens, use_cache=False).loss for m in (mask, torch.ones_like(mask))]
        losses[0].backward()  # after another forward, with another mask
        gradients.append({name: p.grad for name, p in hybrid.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == set(graft_parameters(hybrid))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.mark.parametrize("name", but_slow(KINDS, "nemotron_h", "falcon_h1", "jamba", "kimi_linear"))
def test_examined_located_planned_spliced_saved_and_loaded_again(name, tokenizer, tmp_path):
    """By attribution, and of one model each head exactly."""
    base, exactly = base_of(name, vocab_size=VOCABULARY), name == "falcon_h1"
    options = {"exact": True} if exactly else {"confirm": 0.05, "layers": False}
    ranking = locate(base, tokenizer, options={"pairs": 2}, examples=4, batch_size=2, **options)
    if exactly:
        assert all(score.ablation_loss is not None for score in ranking.heads)
        assert all((score.splice_loss is None) == (score.kind == "attention") for score in ranking.heads)
    ssm, attention = (sum(m.heads for m in anatomy(base).mixers if m.kind == kind) for kind in ("ssm", "attention"))
    kinds = [score.kind for score in ranking.heads]
    assert (kinds.count("ssm"), kinds.count("attention")) == (ssm, attention)
    assert ranking.heads[0].splice_loss is not None
    assert all((score.attribution is None) == (score.kind == "attention") for score in ranking.heads)
    chosen = plan_from(ranking, heads=2)
    for seed, beside in product(range(5), (False, True)):
        if (control := random_plan(ranking, chosen, seed, same_layers=beside)) is not None:
            splice(base, control)  # attention takes no graft, and none is drawn
    hybrid = splice(base, chosen)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    said = {layer: group.heads for group in examine(str(tmp_path / "base")).layers for layer in group.layers}
    assert sorted(layer for layer, heads in said.items() if heads.possible) == [mixer.layer for mixer in anatomy(base).ssms]
    hybrid.save_pretrained(tmp_path / "hybrid")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid")
    again.set_experts_implementation("eager")
    ids = torch.randint(1, 99, (2, 21))
    assert again.surgery.plan == chosen
    assert torch.equal(again(ids).logits, hybrid(ids).logits)
    assert type(unsplice(again)) is type(base)


@pytest.mark.parametrize("name", but_slow(KINDS, "falcon_h1", "jamba"))
def test_a_patch_joined_to_its_base_is_the_hybrid(name, tokenizer, tmp_path):
    base_of(name, vocab_size=VOCABULARY).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base = surgery.load(tmp_path / "base")
    hybrid = splice(base, plan_for(base.model))
    proof = surgery.export(hybrid, tmp_path / "patch", format="patch")
    assert proof.holds()
    joined = surgery.load(tmp_path / "patch").model
    ids = torch.randint(1, 99, (2, 21))
    assert torch.equal(joined(ids).logits, hybrid(ids).logits)


@pytest.mark.parametrize("name", but_slow(KINDS, "falcon_h1", "olmo_hybrid"))
def test_an_export_is_proved_without_this_package(name, tokenizer, tmp_path, fresh_process):
    """In a fresh process, in float32, from a base in 16 bits."""
    base_of(name, vocab_size=VOCABULARY).bfloat16().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base = surgery.load(tmp_path / "base")
    proof = surgery.export(splice(base, plan_for(base.model)), tmp_path / "hf")
    assert proof.reader == "transformers"
    assert proof.holds()


def test_what_cannot_be_grafted_is_refused():
    base = base_of("nemotron_h")
    for layer in (0, 2):  # attention, experts
        with pytest.raises(UserError, match=rf"L{layer}.H1 cannot be grafted: layer {layer} holds no SSM"):
            splice(base, Plan(sites=(f"L{layer}.H1",)))
    with pytest.raises(UserError, match="come without their donor's MLP"):
        splice(base, Plan(kind="layer", sites=("L1",), donor="x", mlp=True), random_donor(hidden=32))
    with pytest.raises(UserError, match="the model has no site"):
        splice(base, Plan(sites=("L1.H4",)))


@pytest.mark.parametrize("name", but_slow(KINDS, "granitemoehybrid"))
def test_tuned(name, tokenizer):
    """Lessons, and text beside the base: as the model's own forward has them, and nothing but the grafts changes."""
    base = base_of(name, vocab_size=VOCABULARY)
    hybrid = splice(base, plan_for(base))
    before = {name: p.clone() for name, p in hybrid.named_parameters()}
    log = tune(hybrid, tokenizer, SHORT.model_copy(update={"align": Align(steps=4, batches=1, learning_rate=1e-4)}))
    assert log[3]["loss"] < log[0]["loss"]  # each graft by itself comes nearer to what it replaces
    assert log[4]["kl"] > 0
    changed = {name for name, p in hybrid.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(graft_parameters(hybrid))


@every_kind
@torch.no_grad()
@pytest.mark.usefixtures("in_float64")
def test_blocks_that_are_run_apart_are_the_model(base, tokens):
    """Whatever they take besides states; the model is as it was, and its teacher shares all but the grafted blocks."""
    hybrid = splice(base.double(), plan_for(base))
    whole, part = hybrid.base_model(tokens, use_cache=False).last_hidden_state, PartialRun(hybrid)
    blocks, positions = list(part.blocks), torch.tensor([73, 0, 7])
    for split in range(len(blocks)):
        below = part(tokens, blocks, 0, split)
        above = part(tokens, blocks, split, len(blocks), states=below, positions=positions, norm=True)
        torch.testing.assert_close(above, whole.flatten(0, 1)[positions], **SAME)
    assert torch.equal(hybrid.base_model(tokens, use_cache=False).last_hidden_state, whole)
    with training(hybrid, trainable(hybrid, None)):
        distillation = Distillation(hybrid, adopt(stock(hybrid)))
    assert distillation.teacher is None
    assert distillation.different == sorted(spec["layer"] for spec in hybrid.config.grafts)


@torch.no_grad()
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", ["falcon_h1", "granitemoehybrid"])
def test_the_losses_of_tuning_are_those_of_the_whole_models(name, tokens):
    base = base_of(name).double()
    hybrid = splice(base, plan_for(base))
    targets = tokens.roll(-1, 1).masked_fill(torch.arange(37) % 3 > 0, IGNORE)
    places = torch.arange(37).expand_as(tokens) % 20  # two documents in a row
    losses = Distillation(hybrid, base)(tokens, targets, (tokens, torch.ones_like(tokens, dtype=torch.bool), places))
    lessons = F.cross_entropy(hybrid(tokens).logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    torch.testing.assert_close(losses["retrieval"], lessons, **SAME)
    student, teacher = (
        torch.cat([model(part).logits.log_softmax(-1) for part in tokens.split([20, 17], 1)], 1) for model in (hybrid, base)
    )
    divergence = F.kl_div(student, teacher, log_target=True, reduction="sum") / tokens.numel()
    torch.testing.assert_close(losses["kl"], divergence, **SAME)
