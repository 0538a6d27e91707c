"""A hybrid computed again in numpy, in float64, from docs/ideas/derivations.md and the exported folder alone.

It reads config.json and the safetensors, and uses neither the package's code nor torch.
"""

import json

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view
from safetensors.numpy import load_file

from surgery.records.plan import Plan, Start
from surgery.splicing.splice import splice
from tests.models import random_base
from tests.surgery.test_export_formats import lively


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def linear(x, tensors, name):
    return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)


def conv(x, weight, bias):
    """Causal and depthwise: x (t, c), weight (c, 1, taps)."""
    taps = weight.shape[-1]
    return (sliding_window_view(np.pad(x, ((taps - 1, 0), (0, 0))), taps, axis=0) * weight[:, 0]).sum(-1) + bias


def attention(q, k, v, scale=1.0):
    """q, k (t, d), v (t, p), causal."""
    scores = q @ k.T * scale
    scores[np.triu_indices(len(q), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def mamba2_mixer(u, tensors, config, graft):
    h, p, n, groups = config["num_heads"], config["head_dim"], config["state_size"], config["n_groups"]
    inner = h * p
    z, xBC, dt = np.split(linear(u, tensors, "in_proj"), [inner, 2 * inner + 2 * groups * n], axis=-1)
    xBC = silu(conv(xBC, tensors["conv1d.weight"], tensors["conv1d.bias"]))
    x, B, C = np.split(xBC, [inner, inner + groups * n], axis=-1)
    x, B, C = x.reshape(-1, h, p), B.reshape(-1, groups, n), C.reshape(-1, groups, n)
    dt = np.logaddexp(0, dt + tensors["dt_bias"])
    y = np.empty_like(x)
    for head in range(h):
        group, state = head // (h // groups), np.zeros((p, n))
        for t in range(len(u)):
            decay = np.exp(-np.exp(tensors["A_log"][head]) * dt[t, head])
            state = decay * state + dt[t, head] * np.outer(x[t, head], B[t, group])
            y[t, head] = state @ C[t, group] + tensors["D"][head] * x[t, head]
    if graft is not None:
        qk = np.concatenate([linear(u, tensors, f"graft.{name}") for name in ("q_proj", "k_proj")], axis=-1)
        qk = silu(conv(qk, tensors["graft.qk_conv.weight"], tensors["graft.qk_conv.bias"]))
        q, k = qk.reshape(len(u), 2, -1, graft["width"]).transpose(1, 2, 0, 3)
        shared = sorted({head // (h // groups) for head in graft["heads"]})
        for i, head in enumerate(graft["heads"]):
            pair = shared.index(head // (h // groups)) if graft["shared"] else i
            query = graft["signs"][i] * np.exp(tensors["graft.log_tau"][i]) * q[pair]
            key, write = k[pair], np.log(dt[:, head])
            query, key = np.c_[query, np.ones(len(u))], np.c_[key, write if graft["time_step"] else np.zeros(len(u))]
            read = graft["signs"][i] * attention(query, key, x[:, head]) + tensors["D"][head] * x[:, head]
            share = 1.0 if graft["blend"] is None else tensors["graft.gate"][i]
            y[:, head] = (1 - share) * y[:, head] + share * read
    gated = (y.reshape(len(u), inner) * silu(z)).reshape(len(u), groups, -1)
    normed = rms(gated, 1.0, config["layer_norm_epsilon"]).reshape(len(u), inner) * tensors["norm.weight"]
    return linear(normed, tensors, "out_proj")


def layer_graft(u, tensors, graft):
    q, k, v = (linear(u, tensors, f"graft.{name}_proj").reshape(len(u), -1, graft["head_dim"]).swapaxes(0, 1) for name in "qkv")
    each = graft["num_heads"] // graft["num_key_value_heads"]
    read = [attention(q[i], k[i // each], v[i // each], graft["scale"]) for i in range(graft["num_heads"])]
    return linear(np.concatenate(read, axis=-1), tensors, "graft.o_proj")


def logits(folder, ids):
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor.astype(np.float64) for name, tensor in load_file(folder / "model.safetensors").items()}
    grafts = {graft["layer"]: graft for graft in config["grafts"]}
    stream, eps = tensors["backbone.embeddings.weight"][ids], config["layer_norm_epsilon"]
    for layer in range(config["num_hidden_layers"]):
        place = f"backbone.layers.{layer}."
        own = {name.removeprefix(f"{place}mixer."): tensor for name, tensor in tensors.items() if name.startswith(place)}
        u, graft = rms(stream, tensors[f"{place}norm.weight"], eps), grafts.get(layer)
        if graft is not None and graft["kind"] == "layer":
            stream = stream + layer_graft(u, own, graft)
        else:
            stream = stream + mamba2_mixer(u, own, config, graft)
    return rms(stream, tensors["backbone.norm_f.weight"], eps) @ tensors["backbone.embeddings.weight"].T


STARTS = {"L0.H1": Start(sign=-1, tau=0.5), "L1.H5": Start(sign=-1, tau=2.0)}
HEADS = ("L0.H1,3", "L1.H0,5,7")
PLANS = {
    "gates": Plan(sites=HEADS, starts=STARTS, blend=0.3),
    "no gate": Plan(sites=HEADS, starts=STARTS),
    "shared pairs, no time step": Plan(sites=("L0.H1,3,6", "L2.H0,1"), shared=True, time_step=False, blend=0.5),
    "layer graft": Plan(kind="layer", sites=("L1",), width=16),
}


@torch.no_grad()
@pytest.mark.parametrize("plan", PLANS)
def test_a_hybrid_is_what_its_page_says(plan, tmp_path):
    """Two B/C groups, several grafts, every parameter moved away from where it starts."""
    hybrid = splice(lively(random_base(n_groups=2)), PLANS[plan])
    generator = torch.Generator().manual_seed(1)
    for name, parameter in hybrid.named_parameters():
        if ".graft." in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    hybrid.save_pretrained(tmp_path)
    ids = torch.randint(1, 99, (1, 60), generator=generator)
    hybrid.double()
    for layer in hybrid.base_model.layers:
        layer.residual_in_fp32 = False
    live = hybrid(ids).logits[0].numpy()
    # The live model rounds its logits and its decays to float32.
    np.testing.assert_allclose(logits(tmp_path, ids[0].numpy()), live, rtol=0, atol=1e-5)
