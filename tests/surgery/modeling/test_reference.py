"""The plain operations: scans against their recurrences, attention against a softmax, chunked, cached, in documents."""

import pytest
import torch
from torch import Tensor

from surgery.modeling import reference
from surgery.modeling.packing import Packing
from surgery.modeling.reference import attend, causal_conv, selective_scan, selective_step, ssd_scan, ssd_step


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def assert_same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("t", [0, 1, 5, 150])
def test_ssd_scan_is_its_recurrence(t: int) -> None:
    x, dt, A = rand(2, t, 4, 3), rand(2, t, 4).exp(), -rand(4).exp()
    B, C, D, state = rand(2, t, 2, 5), rand(2, t, 2, 5, seed=1), rand(4, seed=2), rand(2, 4, 3, 5)
    y, after = ssd_scan(x, dt, A, B, C, D, state)
    outputs = [ssd_step(state, x[:, i], dt[:, i], A, B[:, i], C[:, i], D) for i in range(t)]
    assert_same(y, torch.stack(outputs, 1) if t else x)
    assert_same(after, state)


@pytest.mark.parametrize("t", [0, 1, 17])
def test_selective_scan_is_its_recurrence(t: int) -> None:
    x, dt, A = rand(2, t, 6), rand(2, t, 6, seed=1).exp(), -rand(6, 5).exp()
    B, C, D, state = rand(2, t, 5), rand(2, t, 5, seed=1), rand(6, seed=2), rand(2, 6, 5)
    y, after = selective_scan(x, dt, A, B, C, D, state)
    outputs = []
    for i in range(t):
        decay = torch.exp(A * dt[:, i, :, None])
        state = decay * state + (dt[:, i] * x[:, i])[..., None] * B[:, i, None]
        outputs.append((state * C[:, i, None]).sum(-1) + D * x[:, i])
    assert_same(y, torch.stack(outputs, 1) if t else x)
    assert_same(after, state)
    if t:
        stepped = after.clone()
        selective_step(stepped, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D)
        assert not torch.equal(stepped, after)


def test_causal_conv_goes_on_from_a_context() -> None:
    x, weight, bias = rand(2, 12, 5), rand(5, 1, 4), rand(5)
    whole = causal_conv(x, weight, bias, 12, True)
    assert_same(causal_conv(x[:, 4:], weight, bias, 5, True), whole[:, -5:])
    by_hand = bias + sum(weight[:, 0, i] * x[:, 6 + i] for i in range(4))
    assert_same(causal_conv(x, weight, bias, 12)[:, 9], by_hand)


def plain_attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, null: Tensor | None, mask: Tensor | None) -> tuple:
    (b, h, t, _), s = q.shape, k.shape[2]
    y, m = torch.zeros(b, h, t, v.shape[-1], dtype=v.dtype), torch.ones(b, h, t, dtype=v.dtype)
    for i, j, n in ((i, j, n) for i in range(b) for j in range(h) for n in range(t)):
        seen = [key for key in range(s - t + n + 1) if mask is None or mask[i, key]]
        seen = [key for key in seen if bias is None or bias[i, j % bias.shape[1], key] > -torch.inf]
        scores = [q[i, j, n] @ k[i, j, key] + (0 if bias is None else bias[i, j % bias.shape[1], key]) for key in seen]
        scores += [] if null is None else [null[j]]
        if not scores:
            continue
        p = torch.stack(scores).softmax(0)
        y[i, j, n] = sum((p[at] * v[i, j, key] for at, key in enumerate(seen)), torch.zeros_like(y[i, j, n]))
        m[i, j, n] = 1 if null is None else 1 - p[-1]
    return y, m


@pytest.mark.parametrize("t", [1, 4, 9])
@pytest.mark.parametrize("biased", [None, 1, 3], ids=["no bias", "one bias", "a bias a head"])
@pytest.mark.parametrize("with_null", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_softmax(monkeypatch, t: int, biased: int | None, with_null: bool, masked: bool) -> None:
    monkeypatch.setattr(reference, "QUERIES", 4)
    q, k, v = rand(2, 3, t, 4), rand(2, 3, 9, 4), rand(2, 3, 9, 5)
    bias = None if biased is None else rand(2, biased, 9).masked_fill(torch.arange(9) == 2, -torch.inf)
    null = rand(3) if with_null else None
    mask = torch.arange(9) >= torch.tensor([[0], [6]]) if masked else None
    leaves = [x.requires_grad_() for x in (q, k, v, null) if x is not None]
    gradients = []
    for function in (attend, plain_attend):
        y, m = function(q, k, v, bias, null, mask)
        gradients.append(
            [y, m, *torch.autograd.grad((y * rand(*y.shape)).sum() + (m * rand(*m.shape)).sum(), leaves, allow_unused=True)]
        )
    for one, other in zip(*gradients, strict=True):
        assert_same(torch.nan_to_num(one), torch.zeros_like(one) if other is None else other)


def test_documents_are_read_alone() -> None:
    numbers = torch.tensor([[0, 0, 0, 1, -1, -1, 2, 2], [0, 0, 0, 0, 0, 1, 1, 2]])
    packing = Packing.of(numbers)
    assert packing.padded
    assert packing.seq_idx.unique().tolist() == [-1, 0, 1, 2, 3, 4, 5]
    assert packing.positions()[1].tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    q, k, v, bias, null = rand(2, 3, 8, 4), rand(2, 3, 8, 4, seed=1), rand(2, 3, 8, 5), rand(2, 3, 8), rand(3)
    y, m = attend(q, k, v, bias, null, packing=packing)
    x, dt, B, C = rand(2, 8, 4, 3), rand(2, 8, 4).exp(), rand(2, 8, 2, 5), rand(2, 8, 2, 5, seed=1)
    scanned = ssd_scan(x, dt, -rand(4).exp(), B, C, packing=packing)[0]
    for row, number in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)):
        at = (numbers[row] == number).nonzero()[:, 0]
        one = slice(row, row + 1)
        alone = attend(q[one, :, at], k[one, :, at], v[one, :, at], bias[one, :, at], null)
        assert_same(y[one, :, at], alone[0])
        assert_same(m[one, :, at], alone[1])
        assert_same(scanned[one, at], ssd_scan(x[one, at], dt[one, at], -rand(4).exp(), B[one, at], C[one, at])[0])
    assert (y[0, :, 4:6] == 0).all()


def test_documents_without_padding() -> None:
    packing = Packing.of(torch.tensor([[0, 0, 1], [0, 1, 1]]))
    assert not packing.padded
    assert packing.seq_idx.tolist() == [[0, 0, 1], [2, 3, 3]]
