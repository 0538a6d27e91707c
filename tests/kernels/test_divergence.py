"""Every backend of the divergence against its formulas in float64, and against PyTorch's own loss and its gradient."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from surgery.kernels.divergence import ALONE, KL_DIVERGENCE, kl_divergence
from tests.kernels.inputs import assert_near

BACKENDS = list(KL_DIVERGENCE.backends)
few = settings(deadline=None, max_examples=15)


def make(tokens: int, words: int, scale: float, apart: float, seed: int) -> tuple[Tensor, Tensor]:
    """student and teacher. scale: of the logits; apart: how far the two are from each other."""
    g = torch.Generator().manual_seed(seed)
    teacher = scale * torch.randn(tokens, words, generator=g)
    return teacher + apart * torch.randn(tokens, words, generator=g), teacher


logits = st.builds(
    make, st.integers(1, 9), st.integers(1, 600), st.sampled_from([1.0, 30.0]), st.sampled_from([0.1, 3.0]), st.integers(0, 99)
)


def pytorchs(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    student = student.double().requires_grad_()
    wanted = teacher.double().log_softmax(-1)
    total = F.kl_div(student.log_softmax(-1), wanted, log_target=True, reduction="sum")
    return total.detach(), torch.autograd.grad(total, student)[0]


@pytest.mark.parametrize("backend", BACKENDS)
@few
@given(given_logits=logits)
@example(given_logits=make(3, 1664, 5.0, 0.1, 0))
@example(given_logits=make(2, 50277, 5.0, 0.1, 0))
def test_equals_pytorchs_loss_and_its_gradient(backend, given_logits):
    before = [m.clone() for m in given_logits]
    total, gradient = kl_divergence(*given_logits, backend=backend)
    exact, exact_gradient = pytorchs(*given_logits)
    # A sum of what is positive and negative, each about as large as the logits: their rounding remains.
    assert_near(total, exact, floor=0.1 * len(gradient))
    assert_near(gradient, exact_gradient, floor=1)
    assert all(torch.equal(m, n) for m, n in zip(given_logits, before, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_predictions_are_not_apart(backend):
    same, _ = make(4, 300, 10.0, 0.0, 0)
    total, gradient = kl_divergence(same + 100, same, backend=backend)
    assert abs(total.item()) < 1e-4
    assert gradient.abs().max() < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_and_what_is_not_finite(backend):
    student, teacher = torch.zeros(2, 19), torch.zeros(2, 19)
    student[0, 3], teacher[0, 17], teacher[1, 18] = 1e4, 1e4, -1e4
    total, gradient = kl_divergence(student, teacher, backend=backend)
    torch.testing.assert_close(total, pytorchs(student, teacher)[0].float())
    torch.testing.assert_close(gradient, pytorchs(student, teacher)[1].float())
    for place, value in ((0, float("nan")), (18, float("nan")), (5, float("inf"))):
        broken = student.clone()
        broken[1, place] = value
        total, gradient = kl_divergence(broken, teacher, backend=backend)
        assert total.isnan()
        assert gradient[1].isnan().any()
        assert gradient[0].isfinite().all()


def test_threads_change_nothing():
    given_logits, before, results = make(2 * ALONE // 500, 500, 3.0, 1.0, 0), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(kl_divergence(*given_logits))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(m, n) for m, n in zip(*results, strict=True))


def test_nothing_learns_and_the_gradient_has_the_students_dtype():
    student, teacher = (m.bfloat16().requires_grad_() for m in make(3, 40, 3.0, 1.0, 0))
    for backend in ("native", "stock"):
        total, gradient = kl_divergence(student, teacher, backend=backend)
        assert (total.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
        assert not total.requires_grad
        assert not gradient.requires_grad
        assert_near(gradient, pytorchs(student.detach(), teacher.detach())[1], 5e-3)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="where"):
        kl_divergence(torch.zeros(2, 5), torch.zeros(2, 6), backend="native")
