"""Every backend of the gated delta rule and of its step against the recurrence in float64."""

import pytest
import torch
from torch import Tensor
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_next import modeling_qwen3_next

from surgery.kernels.delta import CHUNK, DELTA_RULE, DELTA_STEP, delta_matrix, delta_rule, delta_step, unit
from tests.kernels.inputs import assert_backends_agree, assert_near

BORDERS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
RULES, STEPS = tuple(DELTA_RULE.backends), tuple(DELTA_STEP.backends)


def make(
    t: int, *, pairs: int = 2, per_pair: int = 2, width: int = 3, size: int = 5, state: bool = True, seed: int = 0
) -> list:
    """The arguments of delta_rule in float32. Some tokens forget everything, some write nothing, some twice over, as keys of
    OLMo-Hybrid may (beta up to 2)."""
    g = torch.Generator().manual_seed(seed)
    heads = pairs * per_pair
    q, k = (3 * torch.randn(2, t, pairs, size, generator=g) for _ in range(2))
    log_decay, beta = -torch.rand(2, t, heads, generator=g), 2 * torch.rand(2, t, heads, generator=g)
    log_decay[torch.rand(log_decay.shape, generator=g) < 0.1] = -500.0
    beta[torch.rand(beta.shape, generator=g) < 0.1] = 0.0
    v, entering = (torch.randn(2, *shape, generator=g) for shape in ((t, heads, width), (heads, size, width)))
    return [q, k, v, log_decay, beta, entering if state else None]


def double(arguments: list) -> list:
    return [None if m is None else m.double() for m in arguments]


@pytest.mark.parametrize("t", BORDERS)
@pytest.mark.parametrize("backend", RULES)
@pytest.mark.parametrize("state", [True, False])
def test_the_rule_equals_the_recurrence(backend, t, state):
    arguments = make(t, state=state)
    for actual, exact in zip(
        delta_rule(*arguments, backend=backend), delta_rule(*double(arguments), backend="reference"), strict=True
    ):
        assert actual.dtype == torch.float32
        assert_near(actual, exact, 1e-4 if backend == "stock" else 1e-5)  # stock sums up the decay in float32


@pytest.mark.parametrize("t", BORDERS)
def test_the_chunked_rule_in_float64(t):
    """As one value head to a pair and as several, forward and backward."""

    def rule(leaves, backend):
        return delta_rule(*leaves, backend=backend)

    for per_pair in (1, 3):
        assert_backends_agree(rule, double(make(t, per_pair=per_pair)), ("chunked", "reference"), 1e-11)


def test_the_rule_in_bfloat16_and_float16():
    for dtype, bound in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        arguments = make(2 * CHUNK + 3)
        arguments = [m.to(dtype) for m in arguments[:3]] + arguments[3:]
        y, state = delta_rule(*arguments)
        exact, exact_state = delta_rule(*double(arguments), backend="reference")
        assert y.dtype == (torch.float32 if dtype == torch.float16 else dtype)
        assert state.dtype == torch.float32
        assert_near(y, exact, bound)
        assert_near(state, exact_state)


@pytest.mark.parametrize("backend", STEPS)
def test_steps_equal_the_recurrence(backend):
    *arguments, state = make(7)
    dtype = torch.double if backend == "reference" else torch.float32
    state, exact = state.to(dtype), delta_rule(*double([*arguments, state]), backend="reference")
    y = torch.stack([delta_step(state, *(m[:, t].to(dtype) for m in arguments), backend=backend) for t in range(7)], 1)
    assert_near(y, exact[0])
    assert_near(state, exact[1])


def test_a_state_carries_a_sequence_on():
    arguments: list[Tensor] = double(make(40))
    whole, last = delta_rule(*arguments)
    *inputs, state = arguments
    parts = []
    for part in (slice(0, 19), slice(19, 20), slice(20, 40)):
        y, state = delta_rule(*(m[:, part] for m in inputs), state)
        parts.append(y)
    assert_near(torch.cat(parts, 1), whole, 1e-12)
    assert_near(state, last, 1e-12)


def test_at_rate_one_the_last_value_of_a_key_replaces_the_others():
    """What the rule is for, and what linear attention without it does not do."""
    g = torch.Generator().manual_seed(0)
    k, v = torch.randn(1, 1, 1, 4, generator=g, dtype=torch.double), torch.randn(1, 5, 1, 3, generator=g, dtype=torch.double)
    k, rates = k.expand(1, 5, 1, 4), torch.ones(1, 5, 1, dtype=torch.double)
    y, _ = delta_rule(k, k, v, 0 * rates, rates)
    assert_near(y * 4**0.5, v, 1e-5)  # length 1 but for the constant that keeps a key of 0 from dividing by 0


def test_nothing_gives_nothing():
    q, k, v, log_decay, beta, state = make(4)
    y, kept = delta_rule(*(m[:, :0] for m in (q, k, v, log_decay, beta)), state)
    assert y.shape == (2, 0, 4, 3)
    assert kept is state
    assert delta_rule(*(m[:0] for m in (q, k, v, log_decay, beta)))[1].shape == (0, 4, 5, 3)


@pytest.mark.parametrize("model", [modeling_qwen3_next, modeling_olmo_hybrid])
def test_stock_is_what_transformers_computes_bit_for_bit(model):
    q, k, v, log_decay, beta, state = make(50)
    ours = delta_rule(q, k, v, log_decay, beta, state, backend="stock")
    theirs = model.torch_chunk_gated_delta_rule(
        q, k, v, g=log_decay, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert all(map(torch.equal, ours, theirs))
    assert torch.equal(unit(q), model.l2norm(q))


@pytest.mark.parametrize("t", [1, 2, 2 * CHUNK + 3])
def test_the_matrix_times_values_is_the_rule(t):
    q, k, v, log_decay, beta, _ = double(make(t, state=True))
    matrix = delta_matrix(q, k, log_decay, beta)
    assert matrix.shape == (2, 4, t, t)
    assert not matrix.triu(1).any()
    assert_near(torch.einsum("bhij,bjhp->bihp", matrix, v), delta_rule(q, k, v, log_decay, beta)[0], 1e-12)
    rows, heads = torch.tensor([t - 1, 0]), [3, 0, 3]
    assert_near(delta_matrix(q, k, log_decay, beta, heads=heads, rows=rows), matrix[:, heads][:, :, rows], 1e-12)
    narrow = [m.bfloat16() for m in (q, k, log_decay, beta)]
    assert delta_matrix(*narrow).dtype == torch.float32
    assert_near(delta_matrix(*narrow), delta_matrix(*(m.double() for m in narrow)), 1e-4)
