"""A mixing matrix times x is what the kernel computes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surgery.kernels.attention import graft_attention
from surgery.kernels.delta import delta_matrix, delta_rule
from surgery.kernels.mixing import attention_matrix, selective_matrix, ssd_matrix
from surgery.kernels.mlstm import mlstm_matrix, mlstm_scan
from surgery.kernels.ssd import ssd_scan
from surgery.kernels.ssd_chunked import CHUNK
from tests.kernels.inputs import assert_near, make_scan, scans
from tests.kernels.test_scans import make_delta, make_mlstm

few = settings(deadline=None, max_examples=15)


def apply(matrix: Tensor, x: Tensor) -> Tensor:
    """matrix (b, h, t, t) and x (b, t, h, p) -> (b, t, h, p)."""
    return torch.einsum("bhij,bjhp->bihp", matrix, x)


@few
@given(scans(st.integers(1, 2 * CHUNK)))
def test_matrix_times_x_is_the_scan(scan):
    scan = scan._replace(initial_state=None)
    x, dt, A, B, C, D, _ = scan
    matrix = ssd_matrix(dt, A, B, C, D=D)
    assert matrix.shape == (len(x), x.shape[2], x.shape[1], x.shape[1])
    assert not matrix.triu(1).any()
    assert_near(apply(matrix, x), ssd_scan(*scan)[0])
    exact = scan.double()
    matrix = ssd_matrix(exact.dt, exact.A, exact.B, exact.C, D=exact.D)
    assert_near(apply(matrix, exact.x), ssd_scan(*exact, backend="reference")[0], 1e-12)


@few
@given(scans(st.integers(1, 20)))
def test_without_the_time_step_it_acts_on_dt_x(scan):
    x, dt, A, B, C, _, _ = scan
    y, _ = ssd_scan(x, dt, A, B, C)
    assert_near(apply(ssd_matrix(dt, A, B, C, time_step=False), dt[..., None] * x), y)


@few
@given(scans(st.integers(1, 20)), st.data())
def test_heads_and_rows_are_slices_of_the_whole(scan, data):
    _, dt, A, B, C, D, _ = scan.double()
    t, h = dt.shape[1:]
    heads = data.draw(st.lists(st.integers(0, h - 1), min_size=1, max_size=4))  # in any order, repeated or not
    rows = torch.tensor(data.draw(st.lists(st.integers(-t, t - 1), min_size=1, max_size=4)))
    whole, part = ssd_matrix(dt, A, B, C, D=D), ssd_matrix(dt, A, B, C, heads=heads, rows=rows, D=D)
    torch.testing.assert_close(part, whole[:, heads][:, :, rows], rtol=1e-12, atol=1e-12)


def test_unknown_heads_and_rows():
    _, dt, A, B, C, _, _ = make_scan(5)
    with pytest.raises(IndexError):
        ssd_matrix(dt, A, B, C, heads=[4])
    with pytest.raises(IndexError):
        ssd_matrix(dt, A, B, C, rows=torch.tensor([5]))


@pytest.mark.parametrize("strength", [1e2, 1e6])
def test_strong_decay(strength):
    """Above the diagonal exp overflows unless it is masked first; inf * 0 would then be a NaN in the gradient."""
    scan = make_scan(CHUNK, forgetting=strength, state=False)
    dt, A, B, C = leaves = [m.requires_grad_() for m in scan[1:5]]
    matrix = ssd_matrix(dt, A, B, C)
    gradients = torch.autograd.grad(matrix.square().sum(), leaves)
    assert all(m.isfinite().all() for m in (matrix, *gradients))


def test_gradients():
    _, dt, A, B, C, D, _ = make_scan(4, batch=1).double().map(Tensor.requires_grad_)
    rows = torch.tensor([3, 1])
    assert torch.autograd.gradcheck(lambda *m: ssd_matrix(*m[:4], heads=[0, 3], rows=rows, D=m[4]), (dt, A, B, C, D))


def test_bfloat16_is_computed_in_float32():
    scan = make_scan(2 * CHUNK, state=False).bfloat16()
    exact = scan.double()
    matrix = ssd_matrix(*scan[1:5])
    assert matrix.dtype == torch.float32
    assert_near(matrix, ssd_matrix(*exact[1:5]))
    q, k = (torch.randn(1, 2, 7, 3, generator=torch.Generator().manual_seed(0)).bfloat16() for _ in "qk")
    assert attention_matrix(q, k).dtype == torch.float32
    assert_near(attention_matrix(q, k), attention_matrix(q.double(), k.double()))


@few
@given(st.integers(1, 3), st.integers(1, 10), st.integers(0, 6), st.data())
def test_attention_matrix_times_v_is_the_attention(pairs, t, past, data):
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    s = t + past
    q = torch.randn(2, pairs, t, 4, generator=g, dtype=torch.float64)
    k = torch.randn(2, pairs, s, 4, generator=g, dtype=torch.float64)
    v = torch.randn(2, 2 * pairs, s, 3, generator=g, dtype=torch.float64)  # two heads a pair
    matrix = attention_matrix(q, k)
    assert not matrix.triu(past + 1).any()
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, pairs, t, dtype=torch.float64))
    y = (matrix.repeat_interleave(2, dim=1) @ v).transpose(1, 2)
    assert_near(y, graft_attention(q, k, v))
    rows = torch.tensor(data.draw(st.lists(st.integers(-t, t - 1), min_size=1, max_size=4)))
    torch.testing.assert_close(attention_matrix(q, k, rows=rows), matrix[:, :, rows])


def make_selective(t: int, *, b: int = 2, d: int = 3, n: int = 4, forgetting: float = 0.3, seed: int = 0) -> tuple[Tensor, ...]:
    """x, dt, A, B, C and D of a Mamba-1 layer, in float64."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.double)

    dt = 0.001 + forgetting * torch.rand(b, t, d, generator=g, dtype=torch.double)
    return normal(b, t, d), dt, -normal(d, n).exp(), normal(b, t, n), normal(b, t, n), normal(d)


def recurrence(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    state, out = torch.zeros(len(x), *A.shape, dtype=x.dtype), []
    for i in range(x.shape[1]):
        step = dt[:, i, :, None]
        state = (step * A).exp() * state + step * B[:, i, None] * x[:, i, :, None]
        out.append((state * C[:, i, None]).sum(-1) + D * x[:, i])
    return torch.stack(out, 1)


@few
@given(st.integers(1, 20), st.sampled_from([0.3, 30.0, 1e6]), st.integers(0, 2**16), st.data())
def test_the_matrix_of_a_channel_times_x_is_its_recurrence(t, forgetting, seed, data):
    x, dt, A, B, C, D = make_selective(t, forgetting=forgetting, seed=seed)
    matrix = selective_matrix(dt, A, B, C, D=D)
    assert not matrix.triu(1).any()
    expected = recurrence(x, dt, A, B, C, D)
    assert_near(torch.einsum("bcij,bjc->bic", matrix, x), expected, 1e-12)
    acting_on_dt_x = selective_matrix(dt, A, B, C, time_step=False)
    assert_near(torch.einsum("bcij,bjc->bic", acting_on_dt_x, dt * x) + D * x, expected, 1e-12)
    channels = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    rows = torch.tensor(data.draw(st.lists(st.integers(-t, t - 1), min_size=1, max_size=4)))
    part = selective_matrix(dt, A, B, C, channels=channels, rows=rows, D=D)
    torch.testing.assert_close(part, matrix[:, channels][:, :, rows], rtol=1e-12, atol=1e-12)
    single = selective_matrix(*(m.float() for m in (dt, A, B, C)))
    assert_near(single, selective_matrix(*(m.float().double() for m in (dt, A, B, C))))


def test_gradients_of_a_channel_at_strong_decay():
    leaves = [m.requires_grad_() for m in make_selective(9, forgetting=1e6)[1:5]]
    assert all(m.isfinite().all() for m in torch.autograd.grad(selective_matrix(*leaves).square().sum(), leaves))


def linear(name: str, t: int) -> tuple:
    """The arguments of a mixer's matrix in float64, the matrix, and what it has to do to the values."""
    if name != "mlstm":
        args = make_delta(t, state=False, by_channel=name == "kda")
        q, k, v, log_decay, beta, _ = (None if m is None else m.double() for m in args)
        return (q, k, log_decay, beta), delta_matrix, v, delta_rule(q, k, v, log_decay, beta)[0]
    q, k, v, write, forgets = (m.double() for m in make_mlstm(t, state=False)[:5])
    return (q, k, write, forgets), mlstm_matrix, v, mlstm_scan(q, k, v, write, forgets)[0]


@pytest.mark.parametrize("t", [1, 2, 35])
@pytest.mark.parametrize("name", ["delta", "kda", "mlstm"])
def test_the_matrix_of_a_linear_mixer_times_values_is_its_scan(name, t):
    args, matrix_of, v, y = linear(name, t)
    matrix = matrix_of(*args)
    assert matrix.shape == (2, 4, t, t)
    assert not matrix.triu(1).any()
    assert_near(apply(matrix, v), y, 1e-10)
    rows, heads = torch.tensor([t - 1, 0]), [3, 0, 3]
    assert_near(matrix_of(*args, heads=heads, rows=rows), matrix[:, heads][:, :, rows], 1e-12)
    if name != "mlstm":  # a row of which is divided by a sum that may cancel
        narrow = [m.bfloat16() for m in args]
        assert matrix_of(*narrow).dtype == torch.float32
        assert_near(matrix_of(*narrow), matrix_of(*(m.double() for m in narrow)), 1e-4)
