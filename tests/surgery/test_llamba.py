"""Llamba: equal to its equations, written out token by token in float64. Its other laws stand in test_laws.py."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from surgery.hybrids.dual import SSDProjected
from surgery.hybrids.llamba import LEAST, LlambaConfig, LlambaForCausalLM
from tests.kernels.inputs import assert_near, rounding
from tests.models import SAME

# As cartesia-ai/Llamba-3B has it, with other sizes.
PUBLISHED = {
    "model_type": "llamba", "vocab_size": 99, "tie_embeddings": True, "pad_vocab_size_multiple": 8, "lm_head_bias": False,
    "d_model": 32, "n_layer": 2, "resid_dropout": 0.0, "norm_epsilon": 1e-5,
    "mlp_cfg": {"intermediate_size": 48, "bias": False, "act_fn": "silu"},
    "ssm_cfg": {"d_state": 8, "n_v_heads": 4, "n_qk_heads": 4, "expand": 1, "chunk_size": 16, "activation": "identity",
                "bias": False},
}  # fmt: skip
VARIANTS = {
    "published": {},
    "shared B and C, untied": {"n_qk_heads": 2, "tie_embeddings": False},
    "biases everywhere": {"bias": True, "lm_head_bias": True, "tie_embeddings": False},
    "wide, activated, no conv bias": {"expand": 2, "n_qk_heads": 1, "activation": "silu", "conv_bias": False, "d_conv": 3},
}


def published(**changes):
    fields = json.loads(json.dumps(PUBLISHED))
    for name, value in changes.items():
        part = fields if name in fields else fields["ssm_cfg"]
        part[name] = value
    if "bias" in changes:
        fields["mlp_cfg"]["bias"] = changes["bias"]
    return fields


def random_llamba(**changes):
    """Random everywhere; the same weights every time."""
    torch.manual_seed(0)
    model = LlambaForCausalLM(LlambaConfig(**published(**changes))).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(std=0.4 if p.ndim == 1 or "conv1d" in name else 1.5 / p.shape[-1] ** 0.5)
            p.add_(1.0 if "layernorm" in name else 0.0)
    return model


@pytest.fixture(params=VARIANTS, ids=lambda name: name.replace(",", "").replace(" ", "-"))
def llamba(request):
    return random_llamba(**VARIANTS[request.param]).to(torch.get_default_dtype())


def reference(model, ids):
    """The equations, one row and one token after the other, in float64, from the tensors by their published names."""
    w = {name: tensor.double() for name, tensor in model.state_dict(keep_vars=True).items()}
    config, ssm = model.config, model.config.ssm_cfg
    heads, pairs, n = ssm["n_v_heads"], ssm["n_qk_heads"], ssm["d_state"]
    inner, state = ssm["expand"] * config.d_model, pairs * n

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(x, name):
        return w[f"{name}.weight"] * x / (x.square().mean() + config.norm_epsilon).sqrt()

    def mixer(u, at, past):
        projected = linear(u, f"{at}.in_proj")
        past["taps"].append(projected[: inner + 2 * state])
        taps = w[f"{at}.conv1d.weight"][:, 0].T  # the newest token's last
        seen = list(zip(reversed(taps), reversed(past["taps"]), strict=False))
        conv = sum(tap * row for tap, row in seen) + w.get(f"{at}.conv1d.bias", 0.0)
        x, B, C = (conv if ssm["activation"] == "identity" else F.silu(conv)).split([inner, state, state])
        z = projected[inner + 2 * state : 2 * inner + 2 * state] + w.get(f"{at}.z_bias", 0.0)
        decay = torch.exp(-F.softplus(projected[2 * inner + 2 * state :]))
        out = []
        for h in range(heads):
            group = slice(h * pairs // heads * n, (h * pairs // heads + 1) * n)
            own = x.view(heads, -1)[h]
            past[h] = decay[h] * past.get(h, 0.0) + torch.outer(own, B[group])
            out.append(past[h] @ C[group] + w[f"{at}.D"][h] * own)
        return linear(torch.cat(out) * F.silu(z), f"{at}.out_proj")

    rows = []
    for row in ids:
        past, logits = [{"taps": []} for _ in range(config.n_layer)], []
        for token in row:
            h = w["backbone.embedding.weight"][token]
            for i in range(config.n_layer):
                at = f"backbone.layers.{i}"
                h = h + mixer(norm(h, f"{at}.input_layernorm"), f"{at}.mixer", past[i])
                u = norm(h, f"{at}.post_attention_layernorm")
                h = h + linear(F.silu(linear(u, f"{at}.mlp.gate_proj")) * linear(u, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
            head = "backbone.embedding" if config.tie_embeddings else "lm_head"
            logits.append(linear(norm(h, "backbone.final_layernorm"), head))
        rows.append(torch.stack(logits))
    return torch.stack(rows)


# Two layers: 32 products in a row for each of six projections, 37 tokens of a scan, and what stands between these.
ERROR = rounding(2 * 300)


def test_logits_are_those_of_the_equations(llamba, tokens, request):
    found, exact = llamba(tokens).logits, reference(llamba, tokens)
    assert_near(found, exact, ERROR)
    request.getfixturevalue("in_float64")
    torch.testing.assert_close(llamba.double()(tokens).logits, exact, **SAME)


def test_gradients_are_those_of_the_equations_and_reach_every_parameter(llamba, tokens):
    def gradients(logits):
        llamba.zero_grad()
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        return {name: p.grad.clone() for name, p in llamba.named_parameters()}

    ours, wanted = gradients(llamba(tokens, use_cache=False).logits), gradients(reference(llamba, tokens))
    assert all(gradient.abs().max() > 0 for gradient in ours.values())
    for name, gradient in wanted.items():
        assert (ours[name] - gradient).norm() < 1e-4 * gradient.norm(), name


def test_the_mixer_remembers_and_forgets_without_bound():
    """Decays of exactly 1 and 0 among ordinary ones: x / dt neither overflows nor loses what it stands for."""
    llamba = random_llamba()
    mixer = llamba.backbone.layers[0].mixer
    torch.manual_seed(1)
    x, B, C = (torch.randn(2, 200, 4, 8) for _ in range(3))
    choice = torch.tensor([-1e4, -200.0, -100.0, -60.0, -25.0, -3.0, 0.0, 3.0, 30.0, 500.0])
    logit = choice[torch.randint(len(choice), (2, 200, 4))]
    logit[0], logit[1, :, 0] = -1e4, 1e4  # one row that never forgets; one head that always does
    x.requires_grad_(), logit.requires_grad_()
    dt = F.softplus(logit).clamp_min(LEAST)
    y = mixer.scan(SSDProjected(x, B, C, x, None, dt))
    state, wanted = torch.zeros(2, 4, 8, 8, dtype=torch.float64), []
    for t in range(200):
        decay = torch.exp(-F.softplus(logit[:, t].double()))[..., None, None]
        state = decay * state + x[:, t, :, :, None] * B[:, t, :, None]
        wanted.append((state @ C[:, t, :, :, None].double())[..., 0] + mixer.D[:, None] * x[:, t])
    wanted = torch.stack(wanted, 1)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-4)
    ours, exact = (torch.autograd.grad(out.square().mean(), (x, logit), retain_graph=True) for out in (y, wanted))
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    steps, cache = [], DynamicCache(config=llamba.config)
    with torch.no_grad():
        for t in range(200):
            cache.update_conv_state(torch.zeros(2, 1, 1), 0, conv_kernel_size=4)  # without it there is no past for the cache
            x_t, B_t, C_t, dt_t = (m[:, t : t + 1] for m in (x, B, C, dt))
            steps.append(mixer.scan(SSDProjected(x_t, B_t, C_t, x_t, None, dt_t), cache))
    torch.testing.assert_close(torch.cat(steps, 1).double(), wanted, rtol=1e-5, atol=1e-4)


def test_every_precision_with_decays_of_one_and_zero():
    llamba = random_llamba()
    tokens = torch.randint(llamba.config.vocab_size, (8, 24), generator=torch.Generator().manual_seed(2))  # errors vary
    with torch.no_grad():
        for block in llamba.backbone.layers:
            block.mixer.in_proj.weight[-2:] *= 200  # the logits of two heads' decays: hundreds, of either sign
    exact = reference(llamba, tokens)
    for dtype, error in ((torch.float32, 1e-5), (torch.float16, 0.02), (torch.bfloat16, 0.1)):
        logits = copy.deepcopy(llamba).to(dtype)(tokens).logits
        assert (logits - exact).norm() < error * exact.norm(), dtype


def test_generation_reads_each_token_once(tokens, monkeypatch):
    """It would be right, and slow, if transformers' cache went unseen."""
    llamba, seen = random_llamba(), []
    forward = llamba.backbone.forward
    monkeypatch.setattr(llamba.backbone, "forward", lambda ids, **named: (seen.append(ids.shape[1]), forward(ids, **named))[1])
    llamba.generate(tokens, max_new_tokens=4, do_sample=False)
    assert seen == [37, 1, 1, 1]


def test_generation_continues_from_a_given_cache(tokens):
    llamba = random_llamba()
    cache = llamba(tokens[:, :20], use_cache=True).cache_params
    whole = llamba.generate(tokens, max_new_tokens=6, do_sample=False)
    piece = llamba.generate(tokens[:, 20:], cache_params=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(piece, whole[:, 20:])


@pytest.mark.usefixtures("in_float64")
def test_outputs_that_were_asked_for(llamba, tokens):
    whole = llamba(tokens, output_hidden_states=True)
    assert [tuple(h.shape) for h in whole.hidden_states] == [(2, 37, 32)] * 3
    torch.testing.assert_close(llamba(tokens, logits_to_keep=3).logits, whole.logits[:, -3:], **SAME)
    embedded = llamba(inputs_embeds=llamba.get_input_embeddings()(tokens)).logits
    assert torch.equal(embedded, whole.logits)
    assert torch.equal(llamba(tokens, return_dict=False)[0], whole.logits)


def test_a_published_checkpoint_loads_and_a_saved_one_has_its_layout(tokens, tmp_path):
    """The names and shapes of Llamba's tensors, its configuration and its file, which has no metadata."""
    torch.manual_seed(2)
    block = {
        "input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,), "mixer.in_proj.weight": (132, 32),
        "mixer.z_bias": (32,), "mixer.conv1d.weight": (96, 1, 4), "mixer.conv1d.bias": (96,), "mixer.D": (4,),
        "mixer.out_proj.weight": (32, 32), "mlp.gate_proj.weight": (48, 32), "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }  # fmt: skip
    shapes = {"backbone.embedding.weight": (104, 32), "backbone.final_layernorm.weight": (32,)}  # 99 ids, padded to 8
    shapes |= {f"backbone.layers.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    tensors = {name: torch.randn(shape) / 3 for name, shape in shapes.items()}
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    save_file(tensors, tmp_path / "model.safetensors")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert model.lm_head.weight is model.backbone.embedding.weight
    assert_near(model(tokens).logits, reference(model, tokens), ERROR)
    model.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == tensors.keys()
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    for name, value in (PUBLISHED | {"vocab_size": 104}).items():
        assert saved[name] == (value | {k: saved[name][k] for k in saved[name]} if isinstance(value, dict) else value)
    assert not {"hidden_size", "num_hidden_layers", "tie_word_embeddings"} & saved.keys()


def test_configuration_has_the_common_names():
    config = LlambaConfig(**published(n_qk_heads=2, expand=2))
    assert (config.hidden_size, config.num_hidden_layers, config.layer_norm_epsilon) == (32, 2, 1e-5)
    assert (config.num_heads, config.head_dim, config.n_groups, config.state_size) == (4, 16, 2, 8)
    assert (config.conv_kernel, config.chunk_size, config.tie_word_embeddings) == (4, 16, True)
    assert (config.intermediate_size, config.hidden_act) == (48, "silu")
    assert config.layer_types == ["linear_attention"] * 2
    assert PUBLISHED["ssm_cfg"]["n_qk_heads"] == 4  # what was given stays as it was
    flat = LlambaConfig(hidden_size=64, num_hidden_layers=3, num_heads=8, n_groups=8, state_size=16, tie_word_embeddings=True)
    assert (flat.d_model, flat.n_layer, flat.ssm_cfg["n_v_heads"], flat.ssm_cfg["d_state"]) == (64, 3, 8, 16)
    assert flat.tie_embeddings


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"ssm_cfg": {"d_inner": 7}}, "'d_inner' of a Llamba's ssm_cfg is not known"),
        ({"ssm_cfg": {"n_qk_heads": 3}}, "32 heads with 3 pairs"),
        ({"ssm_cfg": {"activation": "gelu"}}, "no activation or SiLU, not 'gelu'"),
    ],
)
def test_a_wrong_configuration_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        LlambaConfig(**changes)
