"""A file for llama.cpp; for Mamba-2 with layer grafts, and for bases.

The folder that llama.cpp's converter reads is written first, and proved as any export is, by transformers in a fresh process.
The converter makes the file of it, whose tensors are compared with the folder's; then the folder's own files go.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.exporting.verify import Reader
from surgery.hybrids.spliced import without_code, written
from surgery.kernels.conv import SILU
from surgery.models.answers import held, tensors
from surgery.records.plan import Plan
from surgery.serving import llama_cpp
from surgery.serving.formats import nemotron_h

USE = f"""\
import xllamacpp
options = xllamacpp.CommonParams()
options.model.path, options.n_ctx = "NAME/{llama_cpp.FILE}", 4096
options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(options)
print(server.handle_completions({{"prompt": "The value of the key", "max_tokens": 8}})["choices"][0]["text"])"""
BASES = ("mamba", "mamba2", "falcon_mamba")
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
OF_BASES = True


def write(hybrid: PreTrainedModel, folder: Path, *, tokenizer: PreTrainedTokenizerBase, plan: Plan | None, base: str) -> None:
    """As Format.write says; of a base, which has no plan, too."""
    if reason := why_not(hybrid.config):
        raise UserError(f"{'the hybrid' if plan else 'the base'} cannot be exported as gguf: {reason}")
    llama_cpp.source()
    if plan is not None:
        nemotron_h.write(hybrid, folder, tokenizer=tokenizer, plan=plan, base=base)
    else:
        written(hybrid)(folder)
        without_code(tokenizer).save_pretrained(folder)
        _set(folder / "config.json", pad_vocab_size_multiple=1)  # the size is that of the tensors
    dtypes = {tensor.dtype for tensor in tensors(hybrid).values()}
    dtype = DTYPES.get(next(iter(dtypes)), "f32") if len(dtypes) == 1 else "f32"
    llama_cpp.convert(folder, folder / llama_cpp.FILE, dtype, Path(base).name)


def space(hybrid: PreTrainedModel) -> int:
    """Bytes: the folder that is converted, and the file."""
    return 2 * sum(tensor.nbytes for tensor in tensors(hybrid).values())


def clear(folder: Path) -> None:
    """Remove what the file was made of."""
    for file in folder.iterdir():
        if file.suffix == ".safetensors" or file.name.endswith((".index.json", "config.json")) or "token" in file.name:
            file.unlink()


def _read(hybrid: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the folder that is converted, as transformers has them."""
    return nemotron_h.READER.tensors(hybrid) if getattr(hybrid.config, "grafts", None) else held(hybrid)


READER = Reader(
    "transformers", "transformers", tensors=_read,
    why=f"the folder that llama.cpp's converter made {llama_cpp.FILE} of, which holds the same numbers",
)  # fmt: skip


def why_not(config: Any) -> str | None:
    """Why llama.cpp cannot compute a hybrid or a base of this configuration; None if it can."""
    if getattr(config, "grafts", None):
        reason = nemotron_h.why_not(config)
        if reason is None and config.vocab_size % 8:
            reason = f"there are {config.vocab_size} embeddings, and its converter wants a multiple of 8"
        return re.sub(r"\bnemotron_h\b", "llama.cpp's Nemotron-H", reason) if reason else _unlike(config)
    if config.model_type not in BASES:
        return f"bases are {', '.join(BASES)}, and this one is a {config.model_type}; llama.cpp's own converter may know it"
    return _unlike(config) or _unlike_base(config)


def _unlike(config: Any) -> str | None:
    """Why a hybrid's or a base's SSM is not as llama.cpp computes it."""
    if config.use_bias:
        return "its projections have biases, and llama.cpp's have none"
    if not config.use_conv_bias:
        return "its convolutions have no biases, and llama.cpp's have"
    return None


def _unlike_base(config: Any) -> str | None:
    """Why a base is not as llama.cpp computes its kind."""
    if config.hidden_act not in SILU:
        return f"the SSM's activation is {config.hidden_act}, and llama.cpp's is silu"
    if config.model_type == "mamba2":
        limit = tuple(config.time_step_limit)
        return None if limit == (0.0, float("inf")) else f"the time step is bounded, time_step_limit = {limit}"
    if config.intermediate_size != 2 * config.hidden_size:
        return f"its mixers are {config.intermediate_size} wide, and llama.cpp's twice the model's {config.hidden_size}"
    if config.model_type == "falcon_mamba" and config.mixer_rms_eps != config.layer_norm_epsilon:
        return f"its norms of B, C and dt have another epsilon ({config.mixer_rms_eps:g}) than the others, llama.cpp's the same"
    return None


def _set(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | fields, indent=2) + "\n")
