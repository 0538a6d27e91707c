"""The Triton kernels of graft attention in Triton's interpreter (TRITON_INTERPRET=1), against the reference in float64."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from surgery.kernels.attention_triton import attend_triton
from surgery.modeling import reference
from surgery.modeling.packing import Packing
from tests.kernels.inputs import attention, distance, with_gradients

NUMBERS = torch.tensor([[0] * 20 + [1] * 35 + [2] * 15, [3] * 33 + [4] * 37])
MASK = torch.arange(70).expand(2, -1) >= torch.tensor([[5], [0]])
CASES = {
    "bias and null": ({}, None, None),
    "neither": ({"bias": None, "null": None}, None, None),
    "one bias, padding": ({"bias": 1}, MASK, None),
    "padding alone": ({"bias": None}, MASK, None),
    "documents": ({}, None, Packing.of(NUMBERS)),
    "the last queries": ({"t": 40}, None, None),
    "values in pieces": ({"p": 150}, None, None),
}


def main() -> None:
    for name, (case, mask, packing) in CASES.items():
        given = attention(t=case.get("t", 70), p=case.get("p", 20), dtype=torch.float32)
        given["bias"] = given["bias"][:, :1] if case.get("bias") == 1 else given["bias"]
        args = [None if field in case and case[field] is None else m for field, m in given.items()]
        share = args[4] is not None  # without a null key m is set to 1 by the caller
        seq_idx = None if packing is None else packing.seq_idx
        own = with_gradients(lambda *each: attend_triton(*each, mask, seq_idx)[: 1 + share], args)  # noqa: B023
        truths = with_gradients(lambda *each: reference.attend(*each, mask, packing)[: 1 + share], args, exact=True)  # noqa: B023
        errors = [distance(m, truth) for m, truth in zip(own, truths, strict=True)]
        print(name, *[f"{error:.1e}" for error in errors], flush=True)
        assert max(errors) < 3e-6


if __name__ == "__main__":
    main()
