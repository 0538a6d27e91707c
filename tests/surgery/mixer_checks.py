"""What has to hold of a mixer of linear attention, of whatever kind."""

import torch

from surgery.kernels.dispatch import use
from surgery.records.plan import Plan
from surgery.splicing.splice import splice
from tests.kernels.inputs import assert_near


def entering(model, ids):
    """What enters the mixer of layer 0."""
    seen = []
    handle = model.mixer_at(0).register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args or (kwargs["hidden_states"],))[0]), with_kwargs=True
    )
    model(ids)
    handle.remove()
    return seen[0]


def assert_matrices_are_what_the_mixer_does(base, ids, tolerance):
    """ids: 30 tokens of one sequence."""
    hybrid = splice(base, Plan(sites=("L0.H1,2",), blend=0.3))
    mixer, u = hybrid.mixer_at(0), entering(hybrid, ids)
    _, v, k, q, gates, qk = mixer.project(u)
    matrices = mixer.matrices(u)
    assert_near(torch.einsum("hij,jhp->ihp", matrices, v[0]), mixer.mix(v, k, q, gates, qk)[0], tolerance)
    rows = torch.tensor([29, 3])
    assert_near(mixer.matrices(u, rows=rows, heads=[2, 0]), matrices[[2, 0]][:, rows], 1e-12)


def assert_a_closed_gate_is_the_base(base, ids, stock):
    """Bit for bit with the stock kernels, in float32 as the stock mixer computes; and in steps. ids: 30 tokens."""
    logits = base(ids).logits
    hybrid = splice(base, Plan(sites=("L0.H0,1",), blend=0.0))
    with use(**stock):
        assert torch.equal(hybrid(ids).logits, logits)
        prompt = hybrid(ids[:, :20], use_cache=True)
        cache, step = prompt.past_key_values, []
        for t in range(20, 30):
            step.append(hybrid(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(step, 1), logits[:, 20:], atol=1e-4, rtol=0)
