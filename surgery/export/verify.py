"""Comparing what was read back with what was written.

Equal tensors do not give equal logits to the last bit: the product of a matrix and a single vector is summed in another order
where the matrix lies at another place in memory (up to 2e-5 in the logits of the built-in model). So tensors are compared bit
for bit, and logits within a tolerance.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from surgery.checkpoint import load
from surgery.errors import UserError
from surgery.export import answers as script
from surgery.export.answers import answers, difference
from surgery.splice.patch import tensors

CLOSE = 1e-4  # logits in float32
NEW = 8  # greedy tokens, where the same classes run the same tensors


def compare(hybrid: PreTrainedModel, again: PreTrainedModel, vocabulary: int) -> float:
    """The largest difference of logits between a live hybrid and the same read back. Raises UserError, naming it, for the first
    tensor that is not the same bit for bit."""
    after, read = tensors(hybrid), tensors(again)
    for name in sorted(after | read):
        if name not in read or name not in after or not same(after[name], read[name]):
            raise UserError(f"what was read back is not what was written: the tensor '{name}' differs; nothing was written")
    again.to(hybrid.device)  # type: ignore[arg-type]
    return difference(answers(hybrid, vocabulary, NEW), answers(again, vocabulary, NEW))


def same(first: Tensor, second: Tensor) -> bool:
    """Bit for bit."""
    if first is second:
        return True
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return torch.equal(*(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)))


def prove(asked: Mapping[Path, str]) -> list[float]:
    """For each folder the largest difference of logits between this package and plain transformers. Infinity if the tokens
    differ. In float32, whatever the folder holds: other kernels round otherwise. Raises UserError if transformers cannot read
    one."""
    found = [load(folder, dtype="float32") for folder in asked]
    there = alone(asked)
    return [difference(answers(own.model, len(own.tokenizer)), other) for own, other in zip(found, there, strict=True)]


def alone(asked: Mapping[Path, str]) -> list[dict[str, Tensor]]:
    """For each folder the answers of plain transformers, which runs the folder's lines, as its card gives them, in a fresh
    process (one for all, beside the first folder): prompts of several lengths, and 64 greedy tokens of a padded batch. In
    float32. Raises UserError if transformers cannot read one."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "answers.safetensors"
        command = [sys.executable, "-I", script.__file__, str(out)]
        for folder, lines in asked.items():
            command += [str(folder), lines]
        done = subprocess.run(
            command, cwd=next(iter(asked)).resolve().parent, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False, env=os.environ | {"HF_MODULES_CACHE": place},  # where transformers copies the code to
        )  # fmt: skip
        if done.returncode:
            said = done.stderr.strip().splitlines()
            names = ", ".join(map(str, asked))
            raise UserError(f"transformers alone cannot read {names}: {said[-1] if said else 'it died'}")
        there = load_file(out)
    return [
        {name.removeprefix(f"{folder} "): value for name, value in there.items() if name.startswith(f"{folder} ")}
        for folder in asked
    ]
