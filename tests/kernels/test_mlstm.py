"""Every backend of mLSTM's memory, and its step, against the recurrence in float64."""

import pytest
import torch
from transformers import xLSTMConfig
from transformers.models.xlstm.modeling_xlstm import xLSTMBackend

from surgery.kernels.mlstm import MLSTM_SCAN, MOST, empty_state, mlstm_matrix, mlstm_scan, mlstm_step
from tests.kernels.inputs import assert_backends_agree, assert_near

CHUNK = 8
BORDERS = [1, CHUNK - 1, CHUNK, 3 * CHUNK + 5]
SCANS = tuple(MLSTM_SCAN.backends)


def make(t: int, *, heads: int = 4, width: int = 3, size: int = 5, state: bool = True, seed: int = 0) -> list:
    """The arguments of mlstm_scan in float32. Some tokens forget nearly everything; gates are as wide as published ones."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, t, heads, n, generator=g) for n in (size, size, width))
    write, forget = 5 * torch.randn(2, t, heads, generator=g), 3 + 2 * torch.randn(2, t, heads, generator=g)
    forget[torch.rand(forget.shape, generator=g) < 0.1] = -15.0
    entering = torch.randn(2, heads, width + 1, size, generator=g), torch.rand(2, heads, generator=g)
    return [q, k, v, write, forget, entering if state else None]


def double(arguments: list) -> list:
    return [
        tuple(map(torch.Tensor.double, m)) if isinstance(m, tuple) else None if m is None else m.double() for m in arguments
    ]


def flat(results) -> tuple:
    y, state = results
    return (y, *state)


@pytest.mark.parametrize("t", BORDERS)
@pytest.mark.parametrize("backend", SCANS)
@pytest.mark.parametrize("state", [True, False])
def test_the_scan_equals_the_recurrence(backend, t, state):
    arguments = make(t, state=state)
    results = flat(mlstm_scan(*arguments, chunk_size=CHUNK, backend=backend))
    for actual, exact in zip(results, flat(mlstm_scan(*double(arguments), backend="reference")), strict=True):
        assert actual.dtype == torch.float32
        assert_near(actual, exact, 1e-4)


@pytest.mark.parametrize("t", BORDERS)
def test_the_scan_in_float64_and_its_gradient(t):
    def scan(leaves, backend):
        return flat(mlstm_scan(*leaves[:5], (leaves[5], leaves[6]), backend=backend))

    *given, entering = double(make(t))
    assert_backends_agree(scan, [*given, *entering], ("ssd", "reference"), 1e-9)


def test_the_scan_in_bfloat16_and_float16():
    for dtype, bound in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        arguments = [m.to(dtype) for m in make(2 * CHUNK + 3, state=False)[:5]]
        y, (memory, largest) = mlstm_scan(*arguments)
        exact, _ = mlstm_scan(*double(arguments), backend="reference")
        assert y.dtype == (torch.float32 if dtype == torch.float16 else dtype)
        assert memory.dtype == largest.dtype == torch.float32
        assert_near(y, exact, bound)


def test_gates_at_their_bounds_in_float32():
    """As far as a family takes them, over a long context. With weights of both signs, denominators would be rounding alone."""
    q, k, v, write, forget, _ = make(300, state=False)
    q, k = q.abs(), k.abs()
    for write_at, forget_at in ((MOST, MOST), (-MOST, MOST), (MOST, -MOST)):
        given = [q, k, v, torch.full_like(write, write_at), torch.full_like(forget, forget_at)]
        assert_near(mlstm_scan(*given)[0], mlstm_scan(*double(given), backend="reference")[0], 1e-4)


def test_steps_equal_the_recurrence():
    *arguments, state = make(7)
    exact = flat(mlstm_scan(*double([*arguments, state]), backend="reference"))
    y = torch.stack([mlstm_step(state, *(m[:, t] for m in arguments)) for t in range(7)], 1)
    for actual, expected in zip((y, *state), exact, strict=True):
        assert_near(actual, expected, 1e-5)


def test_a_state_carries_a_sequence_on():
    whole, last = mlstm_scan(*double(make(40)))
    *inputs, state = double(make(40))
    parts = []
    for part in (slice(0, 19), slice(19, 20), slice(20, 40)):
        y, state = mlstm_scan(*(m[:, part] for m in inputs), state)
        parts.append(y)
    assert_near(torch.cat(parts, 1), whole, 1e-12)
    for actual, exact in zip(state, last, strict=True):
        assert_near(actual, exact, 1e-12)


@pytest.mark.parametrize("backend", SCANS)
def test_a_token_that_is_not_there_changes_nothing(backend):
    """With gates of -inf and inf."""
    q, k, v, write, forget, state = make(20)
    write[:, 5:9], forget[:, 5:9] = -torch.inf, torch.inf
    options = {"chunk_size": CHUNK, "backend": backend}
    y, (memory, _) = mlstm_scan(q, k, v, write, forget, state, **options)
    there = [i for i in range(20) if not 5 <= i < 9]
    alone, (expected, _) = mlstm_scan(*(m[:, there] for m in (q, k, v, write, forget)), state, **options)
    assert y.isfinite().all()
    assert_near(y[:, there], alone, 1e-5)
    assert_near(memory, expected, 1e-5)


def test_nothing_gives_nothing():
    q, k, v, write, forget, state = make(4)
    y, kept = mlstm_scan(*(m[:, :0] for m in (q, k, v, write, forget)), state)
    assert y.shape == (2, 0, 4, 3)
    assert kept == state
    assert mlstm_scan(*(m[:0] for m in (q, k, v, write, forget)))[1][0].shape == (0, 4, 4, 5)


@pytest.mark.parametrize("t", [1, 2 * CHUNK + 5])
def test_stock_is_what_transformers_computes_bit_for_bit(t):
    q, k, v, write, forget, _ = make(t)
    config = xLSTMConfig(hidden_size=64, num_heads=4, chunk_size=CHUNK)
    theirs, _ = xLSTMBackend(config)(*(m.transpose(1, 2) for m in (q, k, v, write, forget)))
    assert torch.equal(mlstm_scan(q, k, v, write, forget, chunk_size=CHUNK, backend="stock")[0], theirs.transpose(1, 2))


@pytest.mark.parametrize("t", [1, 2, 2 * CHUNK + 3])
def test_the_matrix_times_values_is_the_scan(t):
    q, k, v, write, forget, _ = double(make(t, state=False))
    matrix = mlstm_matrix(q, k, write, forget)
    assert matrix.shape == (2, 4, t, t)
    assert not matrix.triu(1).any()
    assert_near(torch.einsum("bhij,bjhp->bihp", matrix, v), mlstm_scan(q, k, v, write, forget)[0], 1e-10)
    rows, heads = torch.tensor([t - 1, 0]), [3, 0, 3]
    assert_near(mlstm_matrix(q, k, write, forget, heads=heads, rows=rows), matrix[:, heads][:, :, rows], 1e-12)


def test_an_empty_state_is_of_zeros():
    memory, largest = empty_state(*make(3)[1:3])
    assert memory.shape == (2, 4, 4, 5)
    assert largest.shape == (2, 4)
    assert not memory.any()
