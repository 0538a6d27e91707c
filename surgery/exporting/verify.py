"""Proving an export: a process of its own reads it back as its users will, and answers as the live model does.

Equal tensors do not give equal logits to the last bit: the product of a matrix and a single vector is summed in another order
where the matrix lies at another place in memory (up to 2e-5 in the logits of the built-in model). So tensors are compared bit
for bit, and logits within a tolerance. What is compared is an export, and no kernels: compiled ones, which a folder does not
carry, differ by more (up to 7e-5), so both sides run the ones in Python.
"""

import copy
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.families import family_of
from surgery.kernels.dispatch import use
from surgery.models import answers as script
from surgery.models.answers import LENGTHS, NEW, answers, described, held, named_values
from surgery.models.quantised import is_quantised
from surgery.records.record import Record

CLOSE = 1e-4  # logits in float32
OURS = "mamba-surgery"
KERNELS = {
    "causal_conv": "shifted", "rms_norm": "stock", "ssd_scan": "chunked", "ssd_step": "torch", "selective_scan": "chunked",
    "selective_step": "torch", "graft_attention": "sdpa",
}  # fmt: skip
T = TypeVar("T")
Answers = tuple[dict[str, Tensor], dict[str, str]]  # what answers() gives, and the digest of every tensor


@dataclass(frozen=True)
class Reader:
    """What reads a format back.

    package: whose classes do; if they are not this package's, it is as if that were not installed. lines: Python that loads
    `tokenizer` and `model` from the folder NAME. same: whether the tensors are the hybrid's own, by name and bit for bit. why:
    if the format is for another program, the reason why that one does not read it here.
    """

    package: str
    lines: str
    same: bool = True
    why: str | None = None


class Proof(Record):
    """How an export was verified, in a fresh process and in float32.

    reader, version: what read it. why: the reason why the program that the format is for did not. difference: the largest one
    of logits to the live model. prompts: their lengths in tokens. tokens: how many were then chosen greedily after each prompt
    of a left-padded batch, the same ones as the live model's.
    """

    reader: str
    version: str
    why: str | None
    difference: float
    tolerance: float
    prompts: tuple[int, ...]
    tokens: int

    def line(self) -> str:
        hidden = "" if self.reader == OURS else f" without {OURS}"
        instead = f" ({self.why})" if self.why else ""
        *lengths, last = map(str, self.prompts)
        return (
            f"read back in a fresh process by {self.reader} {self.version}{hidden}{instead}: logits differ by at most "
            f"{self.difference:.2g} after prompts of {', '.join(lengths)} and {last} tokens, alone and in a padded batch; all "
            f"{self.tokens} greedy tokens of each are the same"
        )


def prove(reader: Reader, hybrid: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Proof:
    """Raises UserError if the folder cannot be read, or is another model than the live one."""
    (read_back,) = ask(reader.package, {folder: reader.lines.replace("NAME", str(folder.resolve()))})
    return compare(reader, hybrid, len(tokenizer), read_back)


def compare(reader: Reader, hybrid: PreTrainedModel, vocabulary: int, read_back: Answers) -> Proof:
    """Raises UserError if what was read back is not the live model: by the name of a tensor that differs, or by how much the
    logits do."""
    logits, digests = read_back
    if reader.same:
        live = {name: described(tensor) for name, tensor in held(hybrid)}
        for name in sorted(live | digests):
            if live.get(name) != digests.get(name):
                raise UserError(f"what was read back is not what was written: the tensor '{name}' differs; nothing was written")
    with use(**KERNELS):
        worst = difference(answers(in_float32(hybrid), vocabulary, NEW), logits)
    if not worst <= CLOSE:
        how = f"its logits differ by {worst:.3g}" if math.isfinite(worst) else "it chooses other tokens"
        raise UserError(f"what {reader.package} reads back is not the live model: {how}; nothing was written")
    return Proof(
        reader=reader.package, version=version(reader.package), why=reader.why, difference=worst, tolerance=CLOSE,
        prompts=LENGTHS, tokens=NEW,
    )  # fmt: skip


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference of logits; infinity if other tokens were chosen, or a logit is not a number."""
    if not torch.equal(first["tokens"], second["tokens"]):
        return float("inf")
    each = [(first[name] - second[name]).abs().max() for name in first if name != "tokens"]
    worst = torch.stack(each).max().item()  # Python's max() would lose what is not a number
    return float("inf") if math.isnan(worst) else worst


def ask(package: str, folders: Mapping[Path, str]) -> list[Answers]:
    """For each folder the answers to the model that its lines load, by the classes of `package`, in one fresh process for all.
    Raises UserError if one cannot be read."""
    root = str(Path(script.__file__).parent.parent.parent)
    command = [sys.executable, "-P", script.__file__, root if package == OURS else "-"]
    for folder, lines in folders.items():
        command += [str(folder), lines]
    with tempfile.TemporaryDirectory() as place:
        # transformers copies a folder's code to HF_MODULES_CACHE; it is to download no kernels.
        kernels = ",".join(map("=".join, KERNELS.items()))
        settings = os.environ | {"HF_MODULES_CACHE": place, "USE_HUB_KERNELS": "0", "SURGERY_KERNELS": kernels}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=settings)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        end = f"signal {-done.returncode} ended it" if done.returncode < 0 or not said else said[-1]
        raise UserError(f"{package} cannot read {', '.join(map(str, folders))} in a fresh process: {end}")
    everything = load(done.stdout)
    header = json.loads(done.stdout[8 : 8 + int.from_bytes(done.stdout[:8], "little")])
    digests: dict[str, str] = header["__metadata__"]
    return [(_of(folder, everything), _of(folder, digests)) for folder in folders]


def _of(folder: Path, everything: dict[str, T]) -> dict[str, T]:
    return {name.removeprefix(f"{folder} "): value for name, value in everything.items() if name.startswith(f"{folder} ")}


def in_float32(hybrid: PreTrainedModel) -> PreTrainedModel:
    """The model itself if it is on the CPU in float32, or a copy that is."""
    target = (torch.device("cpu"), torch.float32)
    if all((p.device, p.dtype) == target for p in hybrid.parameters()) and not hasattr(hybrid, "hf_device_map"):
        return hybrid
    if is_quantised(hybrid):
        return script.in_float32(copy.deepcopy(hybrid))
    copied = family_of(hybrid.config).empty(hybrid.config, None, hybrid.config.grafts)
    state = {name: tensor.detach().to(*target) for name, tensor in named_values(hybrid, list(hybrid.state_dict()))}
    copied.load_state_dict(state, assign=True, strict=False)  # of weights that are tied and were put away there is one
    copied.tie_weights()
    copied.generation_config = hybrid.generation_config
    return copied
