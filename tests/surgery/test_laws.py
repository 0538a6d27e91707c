"""The laws of every model whose forward is our own: equal to itself however it is run, and wherever it is loaded.

Head grafts stand in a covering set: every plan in every kind of mixer, and every variant of a base under one plan at least.
"""

import copy
import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from surgery.splicing.splice import graft_parameters, splice, unsplice
from surgery.tuning.partial_run import PartialRun
from tests.conftest import BASES, SAME, but_slow
from tests.kernels.inputs import assert_near
from tests.surgery.test_hybrid import PLANS
from tests.surgery.test_layer_graft import HYBRIDS
from tests.surgery.test_llamba import VARIANTS, random_llamba

COVERING = {  # of each plan, the first bases are quick, each base under one plan; behind ... those of `make test-slow`
    "one head": ("plain", ..., "mamba", "falcon mamba", "llamba"),
    "negative sign and small scale": ("no conv bias", ..., "mamba, biases, untied", "llamba"),
    "no time step": ("untied", ..., "mamba", "llamba"),
    "shared pairs, two layers, one complete": ("falcon mamba", ..., "group per two heads, biases", "mamba", "llamba"),
    "first layer, half blended": ("dt limit", "mamba, biases, untied", ..., "llamba"),
    "uneven groups, width of the state": ("groups", "mamba", ..., "llamba"),
    "copying": ("group per two heads, biases", "llamba", ..., "plain"),
}
HEADS = {
    f"{base}: {plan}": lambda base=base, plan=plan: splice(BASES[base](), PLANS[plan])
    for plan, bases in COVERING.items()
    for base in bases
    if base is not ...
}
LAYERS = {f"{name}: layer": build for name, build in HYBRIDS.items()}
UNTOUCHED = {f"llamba: {name}": lambda name=name: random_llamba(**VARIANTS[name]) for name in VARIANTS}
MODELS = HEADS | LAYERS | UNTOUCHED
SLOW = {f"{base}: {plan}" for plan, bases in COVERING.items() for base in bases[bases.index(...) + 1 :]}
SLOW |= {"mamba2, every layer: layer", "mamba: layer", "llamba: layer", "llamba: shared B and C, untied"}
QUICK = [name for name in MODELS if name not in SLOW]
STEPS = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}


def over(names) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("model", names, ids=lambda name: name.replace(",", "").replace(" ", "-"), indirect=True)


in_float64 = pytest.mark.usefixtures("in_float64")  # before the model is made


@pytest.fixture(params=but_slow(MODELS, *QUICK), ids=lambda name: name.replace(",", "").replace(" ", "-"))
def model(request) -> PreTrainedModel:
    return MODELS[request.param]().to(torch.get_default_dtype())


def test_the_covering_set_has_every_base_and_every_plan():
    assert {base for bases in COVERING.values() for base in bases[: bases.index(...)]} == set(BASES)
    assert set(COVERING) == set(PLANS)


@over(HEADS)
def test_graft_changes_the_logits(model, tokens):
    # Guards the tests below: with grafts that do nothing they would all pass.
    assert (model(tokens).logits - unsplice(model)(tokens).logits).abs().max() > 0.01


@in_float64
def test_cached_equals_uncached(model, tokens):
    """A prompt, single tokens, then several tokens at once from the cache."""
    whole = model(tokens).logits
    output = model(tokens[:, :20], use_cache=True)
    parts, cache = [output.logits], output.cache_params
    for piece in (*tokens[:, 20:30].split(1, dim=1), tokens[:, 30:]):
        parts.append(model(piece, cache_params=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, **SAME)


@in_float64
def test_the_states_of_some_positions_are_those_of_all(model, tokens):
    whole = model.base_model(tokens, use_cache=False).last_hidden_state
    assert whole.shape[:2] == tokens.shape
    positions = torch.tensor([tokens.numel() - 1, 0, 7])
    part = PartialRun(model)
    kept = part(tokens, list(part.blocks), 0, len(part.blocks), positions=positions, norm=True)
    torch.testing.assert_close(kept, whole.flatten(0, 1)[positions], **SAME)


@in_float64
def test_generation_with_cache_equals_generation_without(model, tokens):
    cached, uncached = (model.generate(tokens, max_new_tokens=8, do_sample=False, use_cache=c) for c in (True, False))
    assert torch.equal(cached, uncached)


@in_float64
def test_left_padded_batch_equals_its_rows(model, tokens):
    """Logits of every position and every generated step; row 0 has 5 pads more than row 1. So with a static cache."""
    short = tokens[0, 5:]
    batch, mask = tokens.clone(), torch.ones_like(tokens)
    batch[0, :5], mask[0, :5] = 0, 0
    alone = model(short[None]).logits[0]
    torch.testing.assert_close(model(batch, attention_mask=mask).logits[0, 5:], alone, **SAME)
    together, static = (
        model.generate(batch, attention_mask=mask, max_new_tokens=6, cache_implementation=kind, **STEPS).logits
        for kind in (None, "static")
    )
    single = model.generate(short[None], max_new_tokens=6, **STEPS).logits
    for a, b, c in zip(together, static, single, strict=True):
        torch.testing.assert_close(b, a, **SAME)
        torch.testing.assert_close(a[0], c[0], **SAME)


BEAMS = (
    "plain: one head", "mamba: shared pairs, two layers, one complete", "llamba: first layer, half blended",
    "mamba2, mlp: layer", "mamba2, at random: layer", "mamba2attn: layer", "mamba: layer", "llamba, mlp: layer",
    "llamba: published",
)  # fmt: skip


@in_float64
@over(BEAMS)
def test_beam_search_with_cache_equals_beam_search_without(model, tokens):
    """One model for every kind of state that beams reorder."""
    options = {"num_beams": 3, "max_new_tokens": 4, "do_sample": False}
    cached, uncached = (model.generate(tokens, use_cache=c, **options) for c in (True, False))
    assert cached.shape == (2, 41)
    assert torch.equal(cached, uncached)


@in_float64
@over(LAYERS)
def test_a_mask_of_pairs_gives_the_same_logits(model, tokens):
    causal = torch.ones(37, 37, dtype=torch.bool).tril()[None, None].expand(2, 1, 37, 37)
    torch.testing.assert_close(model(tokens, attention_mask=causal).logits, model(tokens).logits, **SAME)


def test_train_mode_equals_eval_mode_and_checkpointing_changes_no_gradient(model, tokens):
    """Every parameter of a graft learns, save where it cannot: a bias of all keys, the scale of queries that are nothing."""

    def gradients():
        model.zero_grad()
        output = model(tokens, labels=tokens)
        output.loss.backward()
        return output.logits, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    evaluated = model(tokens).logits
    model.train()
    assert torch.equal(model(tokens).logits, evaluated)
    _, plain = gradients()
    for name in graft_parameters(model):
        assert name.endswith(("log_tau", "k_proj.bias")) or plain[name].abs().max() > 0, name
    model.activation_checkpointing_enable()
    logits, recomputed = gradients()
    assert torch.equal(logits, evaluated)
    assert all(torch.equal(recomputed[name], gradient) for name, gradient in plain.items())


def test_reload_equals_live(model, tokens, tmp_path):
    model.save_pretrained(tmp_path)
    reloaded, live = AutoModelForCausalLM.from_pretrained(tmp_path), model.state_dict()
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


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
def test_the_error_of_a_precision(model, tokens, dtype, bound, request):
    """In float32 with the kernels in C, where there is a compiler."""
    logits = copy.deepcopy(model).to(dtype)(tokens).logits.double()
    request.getfixturevalue("in_float64")
    exact = model.double()(tokens).logits
    assert logits.isfinite().all()
    assert ((logits - exact).norm() / exact.norm()) < bound


ALONE = (
    "groups: uneven groups, width of the state", "mamba: one head", "falcon mamba: one head", "llamba: one head",
    "mamba2, mlp: layer", "mamba2attn: layer", "mamba, mlp: layer",
)  # fmt: skip


@pytest.mark.slow
def test_all_load_in_a_fresh_process_without_the_package(tokens, tmp_path):
    """transformers alone, with trust_remote_code, and nothing of a donor: same logits, packed too, same generated tokens, and
    what was loaded can be saved and loaded again."""
    positions = torch.cat([torch.arange(20), torch.arange(17)])[None]
    models = [MODELS[name]() for name in ALONE]
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
