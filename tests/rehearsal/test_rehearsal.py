"""Every verb's forward and backward pass on a GPU that is none, and what the rehearsal finds."""

import pytest

from tests.rehearsal.conftest import rehearse


@pytest.fixture
def models(quick):
    """One line for each family, kind, verb and dtype, then one for everything planted."""
    return [line for line in quick if isinstance(line, list)]


def test_nothing_goes_wrong(models):
    """No tensor on another device, no look at a value, no product by weights in float32 where the model is in 16 bits, and no
    tensor made on the host in a step of decoding."""
    ran = [line for line in models if line[0] != "planted"]
    assert len(ran) == 2 * 3 * 2
    assert {line[-1] for line in ran} == {"ok"}, [line for line in ran if line[-1] != "ok"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("cpu", "RehearsalError: _to_copy copies from the device to the host"),
        ("elsewhere", "Expected all tensors to be on the same device"),
        ("sync", "RehearsalError: _local_scalar_dense waits for the device"),
        ("float32", "RehearsalError: mm computes in float32 in a model of torch.bfloat16"),
        ("list", "makes a tensor on the host"),
    ],
)
def test_what_is_planted_is_found(models, fault, message):
    (found,) = [line[-1] for line in models if line[:2] == ["planted", fault]]
    assert message in found


@pytest.mark.slow
def test_nothing_goes_wrong_in_any_family():
    ran = [line for line in rehearse("rehearse") if line[0] != "planted"]
    assert len(ran) == 4 * 2 * 3 * 3
    assert {line[-1] for line in ran} == {"ok"}, [line for line in ran if line[-1] != "ok"]
