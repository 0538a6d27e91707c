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
        ({"architecture": "aarch64"}, "bf16", False),  # of which torch says nothing
    ],
)
def test_bf16_is_advised_against_where_the_processor_lacks_it(monkeypatch, capsys, capabilities, mixed_precision, advised):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    with autocast(torch.device("cpu"), mixed_precision):
        assert torch.is_autocast_enabled("cpu") == (mixed_precision == "bf16")
    assert ("has no bfloat16 instructions" in capsys.readouterr().err) == advised
