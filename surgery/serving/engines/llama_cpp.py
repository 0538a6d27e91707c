"""llama.cpp, by its bindings xllamacpp."""

from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.runtime.memory import free_disk, size
from surgery.serving import ask_llama_cpp, llama_cpp
from surgery.serving.proving import EngineScript, prove_in_engine

FORMATS = ("gguf", "nemotron_h")


def check() -> None:
    """As Engine.check says: the converter to GGUF."""
    llama_cpp.source()


def _gguf(hybrid: PreTrainedModel, folder: Path, place: Path) -> Path:
    """The folder of a GGUF in float32: matrices of 16 bits llama.cpp multiplies by numbers that it rounds to them."""
    if (folder / llama_cpp.FILE).exists() and {p.dtype for p in hybrid.parameters()} == {torch.float32}:
        return folder
    needed = 4 * sum(p.numel() for p in hybrid.parameters())
    if needed > (free := free_disk(place)):
        raise UserError(
            f"llama_cpp is asked for a copy in float32: that takes {size(needed)}, and {size(free)} are free in {place}"
        )
    llama_cpp.convert(folder, place / llama_cpp.FILE, "f32", folder.name)
    return place


prove = partial(
    prove_in_engine, EngineScript("llama_cpp", Path(ask_llama_cpp.__file__), "xllamacpp", texts=True, prepare=_gguf)
)
