"""Documents that share a row: every kernel gives what it gives for each alone, and nothing crosses their border."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surgery.kernels.attention import GRAFT_ATTENTION, graft_attention
from surgery.kernels.conv import CAUSAL_CONV, causal_conv
from surgery.kernels.delta import DELTA_RULE, delta_rule
from surgery.kernels.lightning import LIGHTNING_SCAN, lightning_scan
from surgery.kernels.mlstm import MLSTM_SCAN, mlstm_scan
from surgery.kernels.packing import FEW, PADDING, packed
from surgery.kernels.selective import SELECTIVE_SCAN, selective_scan
from surgery.kernels.ssd import SSD_SCAN, ssd_scan
from tests.kernels.inputs import assert_near

# Two rows: documents of one token, of fewer than the convolution has taps, of several groups by length; -1: padding.
ROWS = [[(-1, 2), (0, 1), (1, 70), (2, 3), (3, 40), (4, 2)], [(0, 66), (1, 1), (2, 1), (-1, 9), (3, 41)]]
NUMBERS = torch.tensor([[number for number, length in row for _ in range(length)] for row in ROWS])
REAL = NUMBERS >= 0
OPERATIONS = (CAUSAL_CONV, SSD_SCAN, SELECTIVE_SCAN, DELTA_RULE, MLSTM_SCAN, LIGHTNING_SCAN, GRAFT_ATTENTION)
BACKENDS = [(operation.name, backend) for operation in OPERATIONS for backend in operation.backends]


def documents(m):
    """The documents of m (b, t, ...), (1, tokens, ...) each, in order."""
    found = []
    for row, lengths in zip(m, ROWS, strict=True):
        parts = row.split([length for _, length in lengths])
        found += [part[None] for part, (number, _) in zip(parts, lengths, strict=True) if number >= 0]
    return found


def case(operation, dtype):
    """Tensors (b, t, ...) and what an operation makes of them: (them, packing, backend) -> (y, the states after documents)."""
    g = torch.Generator().manual_seed(0)
    b, t = NUMBERS.shape

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.double).to(dtype)

    if operation == "causal_conv":
        weight, bias = normal(10, 1, 4), normal(10)
        return (normal(b, t, 10),), lambda x, packing, backend: (
            causal_conv(x, weight, bias, x.shape[1], True, packing=packing, backend=backend),
            x.new_zeros(len(x), 1) if packing is None else x.new_zeros(9, 1),
        )
    if operation == "ssd_scan":
        A, D = -normal(4).exp(), normal(4)
        tensors = normal(b, t, 4, 3), normal(b, t, 4).exp() / 10, normal(b, t, 2, 5), normal(b, t, 2, 5)
        return tensors, lambda x, dt, B, C, packing, backend: ssd_scan(
            x, dt, A, B, C, D, packing=packing, chunk_size=16, backend=backend
        )
    if operation == "selective_scan":
        A, D = -normal(6, 5).exp(), normal(6)
        tensors = normal(b, t, 6), normal(b, t, 6).exp() / 10, normal(b, t, 5), normal(b, t, 5)
        return tensors, lambda x, dt, B, C, packing, backend: selective_scan(
            x, dt, A, B, C, D, packing=packing, backend=backend
        )
    if operation == "delta_rule":
        rates = -normal(b, t, 4).exp() / 10, normal(b, t, 4).sigmoid()
        return (normal(b, t, 2, 5), normal(b, t, 2, 5), normal(b, t, 4, 3), *rates), delta_rule
    if operation in ("mlstm_scan", "lightning_scan"):
        return linear_case(operation, normal)
    tensors = normal(b, t, 2, 5), normal(b, t, 2, 5), normal(b, t, 4, 7)
    return tensors, lambda q, k, v, packing, backend: (
        graft_attention(*(m.transpose(1, 2) for m in (q, k, v)), packing, backend=backend),
        q.new_zeros(len(q), 1) if packing is None else q.new_zeros(9, 1),
    )


def linear_case(operation, normal):
    """The same for scans with a query and a key to every head."""
    b, t = NUMBERS.shape
    if operation == "lightning_scan":
        slope = normal(4).exp() / 10
        return tuple(normal(b, t, 4, 5) for _ in range(3)), lambda q, k, v, packing, backend: lightning_scan(
            q, k, v, slope, block_size=16, packing=packing, backend=backend
        )

    def one_state(*given, packing, backend):
        y, (memory, largest) = mlstm_scan(*given, chunk_size=16, packing=packing, backend=backend)
        return y, torch.cat([memory.flatten(2), largest[..., None]], -1)

    gates = normal(b, t, 4), 3 + normal(b, t, 4)
    return (normal(b, t, 4, 5), normal(b, t, 4, 5), normal(b, t, 4, 3), *gates), one_state


def serving(operation, backend, dtype):
    """The arguments of `case` for a backend that serves here, or a skip that says why not."""
    kernel = next(o for o in OPERATIONS if o.name == operation)
    example = [m.requires_grad_() if isinstance(m, torch.Tensor) else m for m in kernel.example(torch.device("cpu"), dtype)]
    if reason := kernel.why_not(kernel.backends[backend], *example, by_name=True):
        pytest.skip(f"{backend}: {reason}")
    return case(operation, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("operation", "backend"), BACKENDS)
def test_packed_equals_separate(operation, backend, dtype):
    tensors, run = serving(operation, backend, dtype)
    leaves = [m.clone().requires_grad_() for m in tensors]
    y, states = run(*leaves, packing=packed(NUMBERS), backend=backend)
    assert (y[~REAL] == 0).all()
    alone = [run(*parts, packing=None, backend=backend) for parts in zip(*map(documents, leaves), strict=True)]
    joined = torch.cat([part[0] for part, _ in alone])
    tolerance = 1e-5 if dtype == torch.float32 or backend == "stock" else 1e-12  # stock computes in float32 in part
    assert_near(y[REAL], joined, tolerance)
    assert_near(states, torch.cat([state for _, state in alone]), tolerance, floor=1)
    weights = torch.randn(joined.shape, generator=torch.Generator().manual_seed(1), dtype=torch.double).to(joined.dtype)
    together, apart = (torch.autograd.grad((given * weights).sum(), leaves) for given in (y[REAL], joined))
    for mine, other in zip(together, apart, strict=True):
        assert_near(mine, other, 10 * tolerance)
    whole, _ = run(*leaves, packing=None, backend=backend)
    assert (whole[REAL] - joined).norm() > 0.01 * joined.norm()  # it matters that they are apart


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("operation", "backend"), BACKENDS)
def test_what_is_not_finite_stays_in_its_document(operation, backend, value):
    """Here in the second of the first row, in all that is given for it, and in the padding; as well the way back."""
    tensors, run = serving(operation, backend, torch.float32)
    struck = torch.zeros_like(REAL)
    struck[0, 3:73] = struck[1, 68:77] = True
    leaves = [m.clone().requires_grad_() for m in tensors]
    bad = [torch.where(struck.view(*struck.shape, *[1] * (m.dim() - 2)), value, m).requires_grad_() for m in tensors]
    results = [run(*given, packing=packed(NUMBERS), backend=backend)[0] for given in (leaves, bad)]
    others = REAL & ~struck
    assert torch.equal(results[1][others], results[0][others])
    for mine, other in zip(
        torch.autograd.grad(results[1][others].sum(), bad), torch.autograd.grad(results[0][others].sum(), leaves), strict=True
    ):
        assert torch.equal(mine[others], other[others])


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(st.lists(st.tuples(st.booleans(), st.integers(1, 90)), min_size=1, max_size=12), min_size=1, max_size=3))
def test_every_token_comes_back_to_its_place_and_little_is_padding(rows):
    longest = max(sum(length for _, length in row) for row in rows)
    numbers = torch.full((len(rows), longest), -1)
    places = torch.zeros_like(numbers)
    lengths = []
    for i, row in enumerate(rows):
        begin = 0
        for number, (real, length) in enumerate(row):
            if real:
                numbers[i, begin : begin + length] = number
                places[i, begin : begin + length] = torch.arange(length)
                lengths.append(length)
            begin += length
    if not lengths:
        return
    packing = packed(numbers)
    m = torch.arange(1.0, numbers.numel() * 2 + 1).view(*numbers.shape, 2)
    assert torch.equal(packing.apply(lambda part: part, m), torch.where((numbers >= 0)[..., None], m, 0))
    assert torch.equal(packing.positions(), places)
    assert packing.lengths.tolist() == lengths
    for group in packing.groups:
        real = group.index.numel() if group.pads is None else int((~group.pads).sum())
        shortest = group.index.shape[1] if group.pads is None else int((~group.pads).sum(1).min())
        assert group.index.shape[1] - shortest <= max(FEW, PADDING * group.index.shape[1])
        assert (group.pads is None) == (real == group.index.numel())
    assert sum(len(group.index) for group in packing.groups) == len(lengths)


def test_documents_begin_from_empty_states():
    x = torch.zeros(2, NUMBERS.shape[1], 6)
    with pytest.raises(ValueError, match="leave out initial_state"):
        selective_scan(x, x, -torch.ones(6, 5), x[..., :5], x[..., :5], None, torch.zeros(2, 6, 5), packing=packed(NUMBERS))


@pytest.mark.parametrize(("b", "t"), [(0, 5), (2, 0), (0, 0)])
def test_nothing_gives_nothing(b, t):
    """Of scans there is a test in test_scans.py."""
    x = torch.zeros(b, t, 6)
    assert causal_conv(x, torch.ones(6, 1, 4), None, t).shape == (b, t, 6)
    q, v = x.unflatten(-1, (2, 3)).transpose(1, 2), x.unflatten(-1, (2, 3)).transpose(1, 2)
    assert graft_attention(q, q, v).shape == (b, t, 2, 3)
