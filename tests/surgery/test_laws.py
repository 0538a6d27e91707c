"""The laws of every hybrid, of every family: equal to its base where its grafts do nothing, equal to itself however it is run,
and wherever it is loaded. What kinds of grafts do in a mixer stands in test_mixers.py; here they are spread over the families.
"""

import copy
import hashlib
import json
import os
import subprocess
import sys
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import surgery
from surgery.doctor.examination import examine
from surgery.errors import UserError
from surgery.families import families
from surgery.kernels.dispatch import OPERATIONS, use
from surgery.locating.locate import locate
from surgery.locating.planning import plan as plan_from
from surgery.locating.planning import random_plan
from surgery.models.anatomy import anatomy
from surgery.records.plan import Plan
from surgery.records.recipe import Data
from surgery.splicing.splice import adopt, graft_parameters, splice, stock, unsplice
from surgery.tuning.distil import Distillation
from surgery.tuning.loop import tune
from surgery.tuning.partial_run import PartialRun
from surgery.tuning.sequences import IGNORE
from surgery.tuning.trainable import trainable, training
from tests.kernels.inputs import assert_near
from tests.models import BASES, SAME, VOCABULARY, but_slow
from tests.surgery.stock_bases import ADOPTED, CONFIGURATIONS, KINDS, MAMBAS, base_of, plan_for
from tests.surgery.test_hybrid import PLANS
from tests.surgery.test_layer_graft import HYBRIDS, random_donor
from tests.surgery.test_llamba import VARIANTS, random_llamba
from tests.surgery.test_tune import SHORT

# Each base, and each plan, once at least.
HEADS = (
    "plain: one head", "no conv bias: negative sign and small scale", "untied: no time step",
    "falcon mamba: shared pairs, two layers, one complete", "dt limit: first layer, half blended",
    "mamba, biases, untied: first layer, half blended", "groups: uneven groups, width of the state",
    "mamba: uneven groups, width of the state", "group per two heads, biases: copying", "llamba: copying",
)  # fmt: skip
LAYERS = tuple(f"{name}: layer" for name in HYBRIDS)
UNTOUCHED = tuple(f"llamba: {name}" for name in VARIANTS if name != "shared B and C, untied")
OURS = (*HEADS, *LAYERS, *UNTOUCHED)  # whose forward is our own
MODELS = (*OURS, *CONFIGURATIONS)
# A model of each class, and for every kind of state that beams reorder.
STATES = (
    "plain: one head", "mamba: uneven groups, width of the state", "falcon mamba: shared pairs, two layers, one complete",
    "llamba: copying", "mamba2, mlp: layer", "mamba2, at random: layer", "mamba2attn: layer", "mamba, mlp: layer",
    "llamba, mlp: layer", "llamba: published", "falcon_h1", "zamba2", "jamba", "qwen3_next",
)  # fmt: skip
# Of the same, one for each kind of state.
KINDS_OF_STATE = (
    "plain: one head", "mamba: uneven groups, width of the state", "llamba: copying", "mamba2, at random: layer",
    "mamba2attn: layer", "zamba2", "jamba", "qwen3_next",
)  # fmt: skip
# Of the same, one of each class of ours.
CLASSES = (
    "plain: one head", "mamba: uneven groups, width of the state", "falcon mamba: shared pairs, two layers, one complete",
    "llamba: copying", "mamba2attn: layer", "llamba, mlp: layer",
)  # fmt: skip
STEPS = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}


def model_of(name: str) -> PreTrainedModel:
    """A hybrid by "base: plan", "kind: layer" or a stock family; or a Llamba as it is. The same weights every time."""
    base, _, plan = name.partition(": ")
    if name in CONFIGURATIONS:
        return splice(made := base_of(name), plan_for(made))
    if plan == "layer":
        return HYBRIDS[base]()
    return random_llamba(**VARIANTS[plan]) if plan in VARIANTS else splice(BASES[base](), PLANS[plan])


def over(names, argument="model") -> pytest.MarkDecorator:
    return pytest.mark.parametrize(argument, names, ids=lambda name: name.replace(",", "").replace(" ", "-"), indirect=True)


in_float64 = pytest.mark.usefixtures("in_float64")  # before the model is made


@pytest.fixture
def model(request) -> PreTrainedModel:
    return model_of(request.param).to(torch.get_default_dtype())


@pytest.fixture
def base(request) -> PreTrainedModel:
    return (BASES[request.param]() if request.param in BASES else base_of(request.param)).to(torch.get_default_dtype())


def is_stock(model) -> bool:
    return model.config.model_type.removesuffix("_hybrid") not in {"mamba", "mamba2", "falcon_mamba", "llamba"}


def in_pieces(model, ids, sizes, mask=None):
    """The logits of pieces of so many tokens, all from one cache."""
    cache, parts, end = None, [], 0
    name = "past_key_values" if is_stock(model) else "cache_params"
    for piece in ids.split(sizes, dim=1):
        begin, end = end, end + piece.shape[1]
        options = {"attention_mask": None if mask is None else mask[:, :end], name: cache, "use_cache": True}
        if is_stock(model):
            options["position_ids"] = places(ids, mask)[:, begin:end]
        output = model(piece, **options)
        cache, parts = output[name], [*parts, output.logits]
    return torch.cat(parts, 1)


def places(ids, mask=None):
    """As generate numbers them."""
    return torch.arange(ids.shape[1]).expand_as(ids) if mask is None else (mask.cumsum(-1) - 1).clamp_min(0)


@pytest.fixture
def padded(tokens):
    """The tokens of a batch, and its mask: row 0 has 9 pads more than row 1."""
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    return tokens * mask, mask


def test_every_family_and_every_plan_is_here():
    assert {name.partition(": ")[0] for name in HEADS} == set(BASES)
    assert {name.partition(": ")[2] for name in HEADS} == set(PLANS)
    tested = {base().config.model_type for base in BASES.values()} | {make().model_type for make in CONFIGURATIONS.values()}
    assert tested == {family.model_type for family in families().values()}


@over([*BASES, *CONFIGURATIONS], "base")
@torch.no_grad()
def test_nothing_is_changed_by_a_graft_that_does_nothing(base, tokens):
    """Bit for bit, with stock kernels: nothing spliced, gates at 0, grafts off, grafts taken out."""
    adopted = adopt(base)
    if is_stock(base):
        assert (adopted is base) == (base.config.model_type not in ADOPTED)
    stock_kernels = {name: "stock" for name in OPERATIONS if name != "graft_attention"}
    with use(**stock_kernels):
        logits = base(tokens).logits
        assert torch.equal(adopted(tokens).logits, logits)
        assert torch.equal(splice(base, plan_for(base, blend=0.0))(tokens).logits, logits)
    hybrid, logits, plain = splice(base, plan_for(base)), base(tokens).logits, adopted(tokens).logits
    assert (hybrid(tokens).logits - logits).abs().max() > 1e-3
    with hybrid.disable_grafts():
        assert torch.equal(hybrid(tokens).logits, plain)
    for p in graft_parameters(hybrid).values():
        p.add_(1)  # whatever tuning did to them
    taken_out = unsplice(hybrid)
    assert type(taken_out) is type(base)
    assert taken_out.config.to_dict() == base.config.to_dict()
    assert torch.equal(taken_out(tokens).logits, logits)
    assert all(p is q for p, q in zip(taken_out.parameters(), base.parameters(), strict=True))


@over(HEADS)
def test_graft_changes_the_logits(model, tokens):
    # Guards the tests below: with grafts that do nothing they would all pass.
    assert (model(tokens).logits - unsplice(model)(tokens).logits).abs().max() > 0.01


@over(but_slow(MODELS, *STATES, *CONFIGURATIONS))  # what other plans do in a mixer stands in test_mixers.py
@torch.no_grad()
@in_float64
def test_cached_equals_uncached_and_padded_equals_single(model, tokens, padded):
    """A prompt, single tokens, then several at once from the cache."""
    assert_alike(model, tokens, padded)


def assert_alike(model, tokens, padded):
    whole, (batch, mask) = model(tokens).logits, padded
    # Beside a layer graft the other mixers are transformers' own. Its Mamba-1 loses its state where several tokens come from
    # the cache.
    others = model.config.model_type == "jamba_hybrid" and model.surgery.plan.kind == "layer"
    sizes = [34, 1, 1, 1] if others else [20, 1, 1, 1, 14]
    torch.testing.assert_close(in_pieces(model, tokens, sizes), whole, **SAME)
    alone = model(tokens[:1, 9:]).logits
    together = {"position_ids": places(batch, mask)} if is_stock(model) else {}
    for logits in (model(batch, attention_mask=mask, **together).logits, in_pieces(model, batch, sizes, mask)):
        torch.testing.assert_close(logits[:1, 9:], alone, **SAME)
        torch.testing.assert_close(logits[1], whole[1], **SAME)


@over(but_slow(MODELS, *KINDS_OF_STATE, "bamba"))
@torch.no_grad()
@in_float64
def test_generating_a_padded_batch(model, tokens, padded, request):
    """Logits of every step: as of the row alone, and with a static cache; and as without a cache."""
    batch, mask = padded
    together = model.generate(batch, attention_mask=mask, max_new_tokens=4, **STEPS)
    alone = model.generate(tokens[:1, 9:], max_new_tokens=4, **STEPS)
    for a, b in zip(together.logits, alone.logits, strict=True):
        torch.testing.assert_close(a[0], b[0], **SAME)
    uncached = model.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(uncached[1], together.sequences[1])
    if not is_stock(model) or model.config.model_type == "bamba":
        static = model.generate(batch, attention_mask=mask, max_new_tokens=4, cache_implementation="static", **STEPS).logits
        for a, b in zip(together.logits, static, strict=True):
            torch.testing.assert_close(b, a, **SAME)


@over(but_slow(STATES, *KINDS_OF_STATE))
@torch.no_grad()
@in_float64
def test_beams_of_a_padded_batch(model, tokens, padded):
    batch, mask = padded
    options = {"num_beams": 3, "max_new_tokens": 4, "do_sample": False}
    cached = model.generate(batch, attention_mask=mask, **options)
    assert cached.shape == (2, 41)
    assert torch.equal(cached[0, 37:], model.generate(tokens[:1, 9:], **options)[0, 28:])
    assert torch.equal(cached[1], model.generate(tokens[1:], use_cache=False, **options)[0])


@in_float64
@over(LAYERS)
def test_a_mask_of_pairs_gives_the_same_logits(model, tokens):
    causal = torch.ones(37, 37, dtype=torch.bool).tril()[None, None].expand(2, 1, 37, 37)
    torch.testing.assert_close(model(tokens, attention_mask=causal).logits, model(tokens).logits, **SAME)


@over(but_slow(MODELS, *CLASSES, *CONFIGURATIONS.keys() - {"qwen3_5_moe_text", "falcon_h1, no norm"}))
@torch.no_grad()
@in_float64
def test_blocks_that_are_run_apart_are_the_model(model, tokens):
    """Whatever they take besides states; the model is as it was, and its teacher shares all but the grafted blocks."""
    whole, part = model.base_model(tokens, use_cache=False).last_hidden_state, PartialRun(model)
    assert whole.shape[:2] == tokens.shape
    blocks, positions = list(part.blocks), torch.tensor([73, 0, 7])
    for split in range(len(blocks)):
        below = part(tokens, blocks, 0, split) if split else None
        above = part(tokens, blocks, split, len(blocks), states=below, positions=positions, norm=True)
        torch.testing.assert_close(above, whole.flatten(0, 1)[positions], **SAME)
    assert torch.equal(model.base_model(tokens, use_cache=False).last_hidden_state, whole)
    if is_stock(model):
        with training(model, trainable(model, None)):
            distillation = Distillation(model, adopt(stock(model)))
        assert distillation.teacher is None
        assert distillation.different == sorted(spec["layer"] for spec in model.config.grafts)


@over(but_slow(MODELS, *STATES))
def test_train_mode_equals_eval_mode_and_checkpointing_changes_no_gradient(model, tokens, padded):
    """Every parameter of a graft learns, save where it cannot: a bias of all keys, the scale of queries that are nothing. The
    gradient is of a forward behind which another, with another mask, has come."""
    _, mask = padded

    def gradients():
        model.zero_grad()
        outputs = [model(tokens, attention_mask=m, labels=tokens, use_cache=False) for m in (mask, torch.ones_like(mask))]
        outputs[0].loss.backward()
        return outputs[1].logits, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    evaluated = model(tokens, attention_mask=torch.ones_like(mask), use_cache=False).logits
    model.train()
    logits, plain = gradients()
    assert torch.equal(logits, evaluated)
    grafts = graft_parameters(model)
    if any(not p.requires_grad for p in model.parameters()):
        assert plain.keys() == set(grafts)
    for name in grafts:
        assert name.endswith(("log_tau", "k_proj.bias")) or plain[name].abs().max() > 0, name
    model.activation_checkpointing_enable()
    logits, recomputed = gradients()
    assert torch.equal(logits, evaluated)
    assert all(torch.equal(recomputed[name], gradient) for name, gradient in plain.items())


@over(but_slow(MODELS, *CLASSES, *CONFIGURATIONS))
def test_reload_equals_live(model, tokens, tmp_path):
    model.save_pretrained(tmp_path)
    reloaded, live = AutoModelForCausalLM.from_pretrained(tmp_path), model.state_dict()
    if is_stock(model):
        reloaded.set_experts_implementation("eager")
    assert type(reloaded) is type(model)
    assert reloaded.state_dict().keys() == live.keys()
    assert all(torch.equal(tensor, live[name]) for name, tensor in reloaded.state_dict().items())
    assert torch.equal(reloaded(tokens).logits, model(tokens).logits)
    config = AutoConfig.from_pretrained(tmp_path)
    assert reloaded.config.to_dict() == config.to_dict()
    assert getattr(config, "grafts", None) == getattr(model.config, "grafts", None)


# Of "name shape" of all tensors in what 0.20 wrote.
NAMES = {
    "plain: one head": "8358548d6454a1a2", "mamba: one head": "68e402cb865ec083", "falcon mamba: one head": "68e402cb865ec083",
    "llamba: first layer, half blended": "bda804712a4ce034", "mamba2, mlp: layer": "492da33b2bab742d",
    "llamba: layer": "f62f730b010a4632",
}  # fmt: skip


@over(NAMES)
def test_folders_of_earlier_versions_are_read(model, tmp_path, request):
    """Their tensors have the same names; config.json said what a cache holds, and where the code was."""
    digest = NAMES[request.node.callspec.params["model"]]
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    shapes = sorted(f"{name} {list(tensor.shape)}" for name, tensor in model.state_dict().items() if name not in tied)
    assert hashlib.sha256("\n".join(shapes).encode()).hexdigest().startswith(digest)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    kinds = ["hybrid" if layer == 1 else "linear_attention" for layer in range(model.config.num_hidden_layers)]
    path.write_text(json.dumps(written | {"layer_types": kinds, "auto_map": {"AutoConfig": "mamba2.Mamba2HybridConfig"}}))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.to_dict() == model.config.to_dict() | {"_name_or_path": again.config._name_or_path}
    assert again.state_dict().keys() == model.state_dict().keys()


@over(but_slow(OURS, *HEADS, *CLASSES))
def test_the_error_in_float32(model, tokens, request):
    """With the kernels in C, where there is a compiler. That of 16 bits stands in test_half.py."""
    logits = model(tokens).logits.double()
    request.getfixturevalue("in_float64")
    exact = model.double()(tokens).logits
    assert ((logits - exact).norm() / exact.norm()) < 1e-5


ALONE = (
    "groups: uneven groups, width of the state", "mamba: one head", "falcon mamba: one head", "llamba: one head",
    "mamba2, mlp: layer", "mamba2attn: layer", "mamba, mlp: layer",
)  # fmt: skip


@pytest.mark.slow
def test_all_load_in_a_fresh_process_without_the_package(tokens, tmp_path):
    """transformers alone, with trust_remote_code, and nothing of a donor: same logits, packed too, same generated tokens, and
    what was loaded can be saved and loaded again."""
    positions = torch.cat([torch.arange(20), torch.arange(17)])[None]
    models = [model_of(name) for name in ALONE]
    for i, model in enumerate(models):
        model.save_pretrained(tmp_path / f"hybrid{i}")
    script = f"""
import sys, torch
sys.modules["surgery"] = None  # any import of the package fails
from transformers import AutoModelForCausalLM
tokens = torch.tensor({tokens.tolist()})
positions = torch.tensor({positions.tolist()})
for i in range({len(models)}):
    for folder in (f"hybrid{{i}}", f"again{{i}}"):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        packed = model(tokens, position_ids=positions).logits
        results = [model(tokens).logits, packed, model.generate(tokens, max_new_tokens=5, do_sample=False)]
        torch.save(results, folder + ".pt")
        model.save_pretrained(f"again{{i}}")
"""
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    for i, model in enumerate(models):
        exact = copy.deepcopy(model).double()
        for folder in ("hybrid", "again"):
            logits, packed, generated = torch.load(tmp_path / f"{folder}{i}.pt")
            assert_near(logits, exact(tokens).logits)
            assert_near(packed, exact(tokens, position_ids=positions).logits)
            assert (packed - logits)[:, 20:].abs().max() > 0.01
            assert torch.equal(generated, model.generate(tokens, max_new_tokens=5, do_sample=False))


@over(but_slow(CONFIGURATIONS, "bamba", "xlstm"), "base")
@torch.no_grad()
@in_float64
def test_a_layer_graft_in_a_stock_block(base, tokens, padded, tmp_path):
    """Of a donor with positions: cached, padded, saved, switched off, taken out."""
    layer = anatomy(base).ssms[-1].layer
    plan = Plan(kind="layer", sites=(f"L{layer}",), donor="x", donor_layers={f"L{layer}": 1})
    hybrid = splice(base, plan, random_donor(hidden=base.config.hidden_size))
    logits, plain = hybrid(tokens).logits, base(tokens).logits
    assert (logits - plain).abs().max() > 1e-3
    assert_alike(hybrid, tokens, padded)
    with hybrid.disable_grafts():
        torch.testing.assert_close(hybrid(tokens).logits, plain, **SAME)
    hybrid.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    again.set_experts_implementation("eager")
    torch.testing.assert_close(again(tokens).logits, logits, **SAME)
    taken_out = unsplice(hybrid)
    assert all(p is q for p, q in zip(taken_out.parameters(), base.parameters(), strict=True))
    torch.testing.assert_close(taken_out(tokens).logits, plain, **SAME)


@over(but_slow(MAMBAS, "falcon_h1", "zamba2", "jamba"), "base")
@in_float64
def test_the_start_is_the_heads_own_query_and_key(base):
    """Without decay the SSM of a head is linear attention with the graft's queries and keys."""
    hybrid = splice(base, plan_for(base, width=8, time_step=False))
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


@over([name for name in MAMBAS if name != "jamba"], "base")
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


OWN = ("groups", "mamba", "falcon mamba", "llamba")


@pytest.mark.parametrize("name", but_slow([*OWN, *KINDS], "mamba", "falcon_h1"))
def test_examined_located_planned_spliced_saved_and_loaded_again(name, tokenizer, tmp_path):
    """By attribution, and of one model each head exactly; of another, also what its heads do to another skill."""
    base = (BASES[name] if name in OWN else partial(base_of, name))(vocab_size=VOCABULARY)
    exactly = name == "falcon_h1"
    options = {"exact": True} if exactly else {"exact": 0.05, "layers": False}
    options |= {"data": Data(skills="letters" if name == "mamba" else ())}
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
    if name not in OWN:
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
    log = tune(hybrid, tokenizer, SHORT)
    assert log[0]["kl"] > 0
    changed = {name for name, p in hybrid.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(graft_parameters(hybrid))


@over(["falcon_h1", "granitemoehybrid"], "base")
@torch.no_grad()
@in_float64
def test_the_losses_of_tuning_are_those_of_the_whole_models(base, tokens):
    hybrid = splice(base, plan_for(base))
    targets = tokens.roll(-1, 1).masked_fill(torch.arange(37) % 3 > 0, IGNORE)
    numbers = torch.arange(37).expand_as(tokens) % 20  # two documents in a row
    losses = Distillation(hybrid, base)(tokens, targets, (tokens, torch.ones_like(tokens, dtype=torch.bool), numbers))
    lessons = F.cross_entropy(hybrid(tokens).logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    torch.testing.assert_close(losses["retrieval"], lessons, **SAME)
    student, teacher = (
        torch.cat([model(part).logits.log_softmax(-1) for part in tokens.split([20, 17], 1)], 1) for model in (hybrid, base)
    )
    divergence = F.kl_div(student, teacher, log_target=True, reduction="sum") / tokens.numel()
    torch.testing.assert_close(losses["kl"], divergence, **SAME)
