"""A word where mixed precision costs time (runtime/bf16.py)."""

import pytest
import torch

from surgery.runtime.bf16 import autocast

OLD = {"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": False}


@pytest.mark.parametrize(
    ("capabilities", "mixed_precision", "advised"),
    [
        (OLD, "bf16", True),
        (OLD, None, False),
        (OLD | {"avx512_bf16": True}, "bf16", False),
        (OLD | {"amx_bf16": True}, "bf16", False),
        ({"architecture": "aarch64"}, "bf16", False),  # of which torch says nothing
    ],
)
def test_bf16_is_advised_against_where_the_processor_lacks_it(monkeypatch, capsys, capabilities, mixed_precision, advised):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    with autocast(torch.device("cpu"), mixed_precision):
        assert torch.is_autocast_enabled("cpu") == (mixed_precision == "bf16")
    assert ("has no bfloat16 instructions" in capsys.readouterr().err) == advised


def test_nothing_is_said_by_a_torch_that_cannot_tell(monkeypatch, capsys):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    autocast(torch.device("cpu"), "bf16")
    assert not capsys.readouterr().err
