"""Proving an export: a process of its own reads it back as its users will, and answers as the live model does.

Equal tensors do not give equal logits to the last bit: a sum is taken in another order where a matrix lies at another place in
memory, or another kernel serves. So tensors are compared bit for bit, and logits within what rounding explains.
"""

import copy
import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor
from transformers import PreTrainedModel

from surgery.checking.check import all_laws, check_laws
from surgery.checking.law import measure_rounding
from surgery.checking.shrink import first_of_each_kind
from surgery.errors import UserError
from surgery.exporting import fresh
from surgery.records.record import Record
from surgery.runtime.processes import FreshPython

WIDE = 2**32  # bytes in float32 up to which a model of 16 bits is compared in float32
QUICK = ("cache_chunks", "generate", "left_padding")  # laws that every export is asked


class Proof(Record):
    """How an export was verified."""

    verify: str
    """quick or full."""
    reader: str
    """What read it back: transformers, with the code in the folder and without this package; or surgery."""
    version: str
    """Of the reader."""
    dtype: str
    """What both sides computed in."""
    tensors: int
    """How many were compared, bit for bit."""
    prompts: tuple[int, ...]
    """Tokens of the prompts."""
    tokens: int
    """Greedy tokens that were compared after each prompt, with a cache, in one left-padded batch."""
    difference: float
    """The largest difference of logits."""
    tolerance: float
    """What rounding explains."""
    laws: tuple[str, ...] = ()
    """Laws of a recurrent state that the live model keeps (`surgery check`)."""

    def __str__(self) -> str:
        hidden = " without this package" if self.reader == "transformers" else ""
        laws = f"; {len(self.laws)} laws of its state hold" if self.laws else ""
        return (
            f"read back in a fresh process by {self.reader} {self.version}{hidden}: all {self.tensors} tensors are equal, "
            f"logits differ by at most {self.difference:.2g} (rounding explains {self.tolerance:.2g}), and {self.tokens} "
            f"greedy tokens after each of {len(self.prompts)} prompts are the same{laws}"
        )


def start_reader(hybrid: PreTrainedModel) -> FreshPython:
    """The process that will read the export back; it starts before the export is written."""
    return FreshPython(Path(fresh.__file__), gpu=hybrid.device.type == "cuda")


def prove(
    process: FreshPython, hybrid: PreTrainedModel, tokens: int, folder: Path, *, reader: str, verify: str, base: str = ""
) -> Proof:
    """Compare what a fresh process reads back from `folder` with the live model.

    tokens: how many the tokenizer has. base: where that of a patch is. Raises UserError if the folder cannot be read, or is
    another model.
    """
    # In float32 a defect stands out; large models of 16 bits are compared in their own, unless the proof is to be full.
    wide = 4 * sum(parameter.numel() for parameter in hybrid.parameters())
    dtype = "float32" if verify == "full" or wide <= WIDE else str(hybrid.dtype).removeprefix("torch.")
    request = {"folder": str(folder.resolve()), "reader": reader, "base": base, "verify": verify}
    threads, mode = torch.get_num_threads(), hybrid.training
    half = max(1, threads // 2)  # each side has half of the cores: on shared ones threads wait for each other
    process.send(request | {"dtype": dtype, "device": str(hybrid.device), "threads": half})  # and meanwhile the same here
    torch.set_num_threads(half)
    try:
        laws, sums = check_state(hybrid, full=verify == "full"), fresh.checksums(hybrid)
        live = hybrid if str(hybrid.dtype) == f"torch.{dtype}" else copy.deepcopy(hybrid).to(getattr(torch, dtype))
        ours = fresh.answer(live, tokens, verify)
        prompts = fresh.make_prompts(live, tokens, verify)
        allowed = measure_rounding(live, ours[f"prompt {len(prompts[-1])}"], prompts[-1][None])
        output = process.receive()
    finally:
        hybrid.train(mode)
        torch.set_num_threads(threads)
    theirs = load(output)
    header = json.loads(output[8 : 8 + int.from_bytes(output[:8], "little")])["__metadata__"]
    if wrong := sorted(name for name in sums.keys() | header.keys() if sums.get(name) != header.get(name)):
        raise UserError(f"the copy that was read back differs from the model in the tensor '{wrong[0]}'; no export was made")
    difference = compare_answers(ours, theirs, allowed)
    if not difference <= allowed:
        raise UserError(f"the copy that was read back differs from the model by {difference:.3g} in logits; no export was made")
    package = "transformers" if reader == "transformers" else "mamba-surgery"
    return Proof(
        verify=verify,
        reader=reader,
        version=version(package),
        dtype=dtype,
        tensors=len(sums),
        prompts=fresh.LENGTHS[verify],
        tokens=fresh.NEW[verify],
        difference=difference,
        tolerance=allowed,
        laws=laws,
    )


def check_state(hybrid: PreTrainedModel, *, full: bool) -> tuple[str, ...]:
    """The laws of a recurrent state that a model keeps; "save and load again" is what a proof itself asks. full: all but the
    slow ones; else those of QUICK, of a large model asked of the first layer of each kind, and of none where a large model
    cannot be cut so. A quantised model, or one that is spread over devices, is not asked. Raises UserError for a broken law."""
    if hybrid.__dict__.get("is_quantized") or hybrid.__dict__.get("hf_device_map"):
        return ()
    asked: Any = hybrid if full else first_of_each_kind(hybrid)
    if not full and 4 * sum(parameter.numel() for parameter in asked.parameters()) > WIDE:
        return ()
    every = tuple(name for name, law in all_laws().items() if not law.slow and name != "save_load")
    findings, _ = check_laws(asked, only=every if full else QUICK)
    if wrong := next((finding for finding in findings if finding.verdict == "wrong"), None):
        raise UserError(f"the model breaks the law '{wrong.law}': {wrong.meaning} ({wrong.where}); no export was made")
    return tuple(finding.law for finding in findings if finding.verdict == "right")


def compare_answers(ours: dict[str, Tensor], theirs: dict[str, Tensor], allowed: float) -> float:
    """The largest difference of logits. A row of greedy tokens is compared up to the first one that differs; where that is no
    tie within `allowed`, the difference is infinite, as it is where a logit is not a number."""
    same = ours["tokens"] == theirs["tokens"]
    before = torch.cat([torch.ones_like(same[:, :1]), same.int().cumprod(dim=1).bool()[:, :-1]], dim=1)
    for row, step in (~same & before).nonzero().tolist():
        logits = ours["batch"][row, step]
        if logits.max() - logits[theirs["tokens"][row, step]] > 2 * allowed:
            return math.inf
    worst = [(ours[name] - theirs[name]).abs().max() for name in ours if name.startswith("prompt")]
    worst.append((ours["batch"] - theirs["batch"]).abs().amax(dim=2)[before].max())
    difference = torch.stack(worst).max().item()
    return math.inf if math.isnan(difference) else difference
