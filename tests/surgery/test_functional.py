"""torch.func on whole hybrids: in float64, and in float32, where the compiled kernels would serve otherwise."""

import pytest
import torch
from torch.func import functional_call, grad, jacrev, vmap

from surgery.splicing.splice import graft_parameters, splice
from tests.conftest import BASES
from tests.surgery.test_half import HEADS

HYBRIDS = pytest.mark.parametrize("base", ["plain", "mamba", "llamba"])


def close(one, two):
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


@HYBRIDS
def test_grad_of_grafts_alone_and_by_row(base, tokens):
    hybrid = splice(BASES[base](), HEADS)
    grafts = {name: p.detach() for name, p in graft_parameters(hybrid).items()}

    def loss(grafts, ids):
        return functional_call(hybrid, grafts, (ids,), {"use_cache": False}).logits.square().mean()

    hybrid(tokens, use_cache=False).logits.square().mean().backward()
    exact = {name: p.grad for name, p in graft_parameters(hybrid).items()}
    found = grad(loss)(grafts, tokens)
    rows = vmap(grad(loss), in_dims=(None, 0))(grafts, tokens[:, None])
    for name in grafts:
        close(found[name], exact[name])
        close(rows[name].mean(0), exact[name])


@HYBRIDS
@torch.no_grad()
def test_a_jacobian(base):
    hybrid = splice(BASES[base](), HEADS)
    states = torch.randn(1, 7, hybrid.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def last(states):
        return hybrid(inputs_embeds=states, use_cache=False).logits[0, -1, :3]

    found = jacrev(last)(states)
    with torch.enable_grad():
        leaf = states.clone().requires_grad_()
        exact = torch.stack([torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in last(leaf)])
    close(found, exact)
