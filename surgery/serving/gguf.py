"""A file for llama.cpp: of Mamba-2 with layer grafts, as a Nemotron-H, and of bases (Mamba-1, Mamba-2, Falcon-Mamba).

The folder that llama.cpp's converter reads is written to a temporary place. The converter is in llama.cpp's sources, which the
variable LLAMA_CPP names, and makes the file of it, whose tensors are compared with the folder's (to_gguf.py).
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.exporting.tokenizer import save_tokenizer
from surgery.modeling.graft import SILU
from surgery.serving import nemotron_h, to_gguf
from surgery.splicing.splice import unsplice

FILE = "model.gguf"
BASES = ("mamba", "mamba2", "falcon_mamba")
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def export_gguf(hybrid: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model.gguf. Raises UserError for a model that llama.cpp cannot compute, naming what it is."""
    if reason := why_not(hybrid.config):
        raise UserError(f"the model cannot be exported as gguf: {reason}")
    source()
    dtypes = {tensor.dtype for tensor in hybrid.state_dict().values()}
    with tempfile.TemporaryDirectory() as place:
        if getattr(hybrid.config, "grafts", None):
            nemotron_h.export_nemotron_h(hybrid, tokenizer, Path(place))
        else:
            write_base(hybrid, tokenizer, Path(place))
        convert(Path(place), folder / FILE, DTYPES.get(next(iter(dtypes)), "f32") if len(dtypes) == 1 else "f32")


def write_base(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """A base's folder as the converter reads it."""
    base = unsplice(model) if hasattr(model.config, "grafts") else model
    base.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"pad_vocab_size_multiple": 1})
    )  # the size is that of the tensors


def source() -> Path:
    """The folder of llama.cpp's sources. Raises UserError if there is none."""
    named = os.environ.get("LLAMA_CPP")
    if not named:
        raise UserError("GGUF is written by llama.cpp's converter: set LLAMA_CPP to the folder of llama.cpp's sources")
    folder = Path(named).expanduser().absolute()
    if not (folder / "convert_hf_to_gguf.py").is_file() or not (folder / "conversion" / "base.py").is_file():
        raise UserError(f"LLAMA_CPP: {folder} is not llama.cpp's sources of 2026: it lacks conversion/base.py")
    return folder


def convert(folder: Path, out: Path, dtype: str) -> None:
    """Write the GGUF of a Hugging Face folder, with matrices in `dtype` (f32, f16, bf16), and compare its tensors with the
    folder's. Raises UserError if the converter cannot, or a tensor differs."""
    command = [sys.executable, "-P", to_gguf.__file__, str(source()), str(folder.resolve()), str(out.resolve()), dtype]
    settings = {key: value for key, value in os.environ.items() if key != "NO_LOCAL_GGUF"}  # the package is the sources' own
    settings |= {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "0"}
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(command, cwd=place, env=settings, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        raise UserError(f"llama.cpp's converter cannot write it: {lines[-1].removeprefix('RuntimeError: ')}")


def why_not(config: Any) -> str | None:
    """Why llama.cpp cannot compute a model of this configuration; None if it can."""
    kind = config.model_type.removesuffix("_hybrid")
    if getattr(config, "grafts", None):
        reason = nemotron_h.why_not(config)
        if reason is None and config.vocab_size % 8:
            reason = f"there are {config.vocab_size} embeddings, and its converter wants a multiple of 8"
        return reason.replace("nemotron_h", "llama.cpp's Nemotron-H") if reason else _unlike(config)
    if kind not in BASES:
        return f"bases are {', '.join(BASES)}, and this one is a {kind}; llama.cpp's own converter may know it"
    return _unlike(config) or _unlike_base(config, kind)


def _unlike(config: Any) -> str | None:
    """Why an SSM is not as llama.cpp computes it."""
    if config.use_bias:
        return "its projections have biases, and llama.cpp's have none"
    return None if config.use_conv_bias else "its convolutions have no biases, and llama.cpp's have"


def _unlike_base(config: Any, kind: str) -> str | None:
    """Why a base is not as llama.cpp computes its kind."""
    if config.hidden_act not in SILU:
        return f"the SSM's activation is {config.hidden_act}, and llama.cpp's is silu"
    if kind == "mamba2":
        limit = tuple(config.time_step_limit)
        return None if limit == (0.0, float("inf")) else f"the time step is bounded, time_step_limit = {limit}"
    if config.intermediate_size != 2 * config.hidden_size:
        return f"its mixers are {config.intermediate_size} wide, and llama.cpp's twice the model's {config.hidden_size}"
    if kind == "falcon_mamba" and config.mixer_rms_eps != config.layer_norm_epsilon:
        return f"its norms of B, C and dt have another epsilon ({config.mixer_rms_eps:g}) than the others, llama.cpp's the same"
    return None
