"""A process of its own that reads exports back, and answers for them."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from safetensors.torch import load
from torch import Tensor

from surgery.errors import UserError
from surgery.models import answers as script

OURS = "mamba-surgery"
KERNELS = {
    "causal_conv": "shifted", "rms_norm": "stock", "ssd_scan": "chunked", "ssd_step": "torch", "selective_scan": "chunked",
    "selective_step": "torch", "graft_attention": "sdpa",
}  # fmt: skip
# What the last line of a process says that could not get memory.
NO_MEMORY = ("MemoryError", "can't allocate memory", "Cannot allocate memory", "bad_alloc")
T = TypeVar("T")
Answers = tuple[dict[str, Tensor], dict[str, str]]  # what answers() gives, and the digest of every tensor


class OutOfMemory(UserError):
    """Memory ran out, here or in the fresh process."""


def ask(package: str, folders: Mapping[Path, str], new: int = script.NEW) -> list[Answers]:
    """For each folder the answers of its model, by the classes of `package`, in one fresh process for all. folders: each with
    how it is read (answers.READ). new: how many greedy tokens; with 0 nothing but digests.

    Raises OutOfMemory if that seems to be what ended the process, and UserError if a folder cannot be read.
    """
    root = str(Path(script.__file__).parent.parent.parent)
    command = [sys.executable, "-P", script.__file__, root if package == OURS else "-", str(new)]
    for folder, how in folders.items():
        command += [str(folder.resolve()), how]
    with tempfile.TemporaryDirectory() as place:
        # transformers copies a folder's code to HF_MODULES_CACHE; it is to download no kernels.
        kernels = ",".join(map("=".join, KERNELS.items()))
        settings = os.environ | {
            "HF_MODULES_CACHE": place,
            "USE_HUB_KERNELS": "0",
            "SURGERY_KERNELS": kernels,
            "THP_MEM_ALLOC_ENABLE": "1",
        }  # large pages: float32 copies are filled three times as fast
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=settings)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        end = f"signal {-done.returncode} ended it" if done.returncode < 0 or not said else said[-1]
        error = f"{package} cannot read {', '.join(map(str, folders))} in a fresh process: {end}"
        # The system ends by signal 9 what takes the last of its memory.
        raise OutOfMemory(error) if done.returncode == -9 or any(text in end for text in NO_MEMORY) else UserError(error)
    everything = load(done.stdout)
    header = json.loads(done.stdout[8 : 8 + int.from_bytes(done.stdout[:8], "little")])
    digests: dict[str, str] = header.get("__metadata__", {})
    return [(_of(number, everything), _of(number, digests)) for number in range(len(folders))]


def _of(number: int, everything: dict[str, T]) -> dict[str, T]:
    return {name.removeprefix(f"{number} "): value for name, value in everything.items() if name.startswith(f"{number} ")}
