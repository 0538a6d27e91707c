"""llama.cpp's converter, which is no package of its own: it is in llama.cpp's sources, and is run from there."""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from surgery.errors import UserError
from surgery.serving import to_gguf

FILE = "model.gguf"
HOW = "the page on serving says how to get it"


def source() -> Path:
    """The folder of llama.cpp's sources. Raises UserError, in one line that says what to do, if there is none."""
    named = os.environ.get("LLAMA_CPP")
    if not named:
        raise UserError(f"GGUF is written by llama.cpp's converter: set LLAMA_CPP to the folder of llama.cpp's sources ({HOW})")
    folder = Path(named).expanduser().absolute()
    if not (folder / "convert_hf_to_gguf.py").is_file():
        raise UserError(f"LLAMA_CPP: there is no convert_hf_to_gguf.py in {folder}; it is to be llama.cpp's sources ({HOW})")
    if not (folder / "conversion" / "base.py").is_file():
        raise UserError(f"LLAMA_CPP: the llama.cpp in {folder} is too old; its converter has no folder 'conversion' ({HOW})")
    return folder


def convert(folder: Path, out: Path, dtype: str, name: str) -> None:
    """Write the GGUF of a Hugging Face folder, with matrices in `dtype` (f32, f16, bf16), and compare its tensors with the
    folder's. name: the model's, which the file holds. Raises UserError if the converter cannot, or a tensor differs."""
    command = [sys.executable, "-P", to_gguf.__file__, str(source()), str(folder.resolve()), str(out.resolve()), dtype, name]
    settings = os.environ | {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "0"}
    settings.pop("NO_LOCAL_GGUF", None)  # the package gguf is to be the sources' own
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            command, cwd=place, env=settings, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            check=False,
        )  # fmt: skip
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"{shlex.join(command[:3])} ended with {done.returncode}"
        raise UserError(f"llama.cpp's converter cannot write it: {reason.removeprefix('RuntimeError: ')}; nothing was written")
