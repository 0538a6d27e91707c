"""torch.func on whole hybrids: in float64, and in float32, where the compiled kernels would serve otherwise."""

import copy
from functools import partial

import pytest
import torch
from torch.func import functional_call, grad, jacrev, vmap

from surgery.splicing.splice import graft_parameters, splice
from tests.kernels.inputs import assert_near, rounding
from tests.models import BASES, SAME
from tests.surgery.test_half import HEADS

HYBRIDS = pytest.mark.parametrize("base", ["plain", "mamba", "llamba"])


# Three layers, of 64 to 256 products in a row for each projection, 37 tokens of a scan, and sums of norms; there and back.
ERROR = rounding(2 * 3 * 800)


def hybrids(base):
    """In float64, where what is compared has to be the same, and in float32."""
    hybrid = splice(BASES[base](), HEADS).double()
    return hybrid, copy.deepcopy(hybrid).to(torch.float32)


def gradients_of(hybrid, tokens):
    """By torch.func: of the grafts, and of the grafts by row."""
    grafts = {name: p.detach() for name, p in graft_parameters(hybrid).items()}

    def loss(grafts, ids):
        return functional_call(hybrid, grafts, (ids,), {"use_cache": False}).logits.square().mean()

    return grad(loss)(grafts, tokens), vmap(grad(loss), in_dims=(None, 0))(grafts, tokens[:, None])


@HYBRIDS
def test_grad_of_grafts_alone_and_by_row(base, tokens, request):
    wide, narrow = hybrids(base)
    found = gradients_of(narrow, tokens)
    request.getfixturevalue("in_float64")
    whole, rows = gradients_of(wide, tokens)
    wide(tokens, use_cache=False).logits.square().mean().backward()
    for name, p in graft_parameters(wide).items():
        torch.testing.assert_close(whole[name], p.grad, **SAME)
        torch.testing.assert_close(rows[name].mean(0), p.grad, **SAME)
        assert_near(found[0][name], p.grad, ERROR)
        assert_near(found[1][name].mean(0), p.grad, ERROR)


@HYBRIDS
@torch.no_grad()
def test_a_jacobian(base, request):
    wide, narrow = hybrids(base)
    states = torch.randn(1, 7, wide.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def last(hybrid, states):
        return hybrid(inputs_embeds=states, use_cache=False).logits[0, -1, :3]

    found = jacrev(partial(last, narrow))(states)
    request.getfixturevalue("in_float64")
    with torch.enable_grad():
        leaf = states.double().requires_grad_()
        exact = torch.stack([torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in last(wide, leaf)])
    torch.testing.assert_close(jacrev(partial(last, wide))(states.double()), exact, **SAME)
    assert_near(found, exact, ERROR)
