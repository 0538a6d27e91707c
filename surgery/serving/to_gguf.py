"""Runs llama.cpp's own converter on a Hugging Face folder, and compares the file with the folder, tensor for tensor. A script:

    python -P to_gguf.py LLAMA_CPP FOLDER OUT DTYPE

The converter is told three things:

- The configuration is what config.json says. It would ask transformers, and version 5 adds the defaults of fields that are not
  there: experts, and with them another architecture (nemotron_h_moe).
- It knows a tokenizer's way to split texts into words by a digest of its token ids, so of the vocabularies alone that it has
  met. Where it does not know one, and tokenizer.json says that words are split as GPT-2 does, that is what the file says. Any
  other is refused.
- Decays are exponentials of numbers in float32, not in the 16 bits that the folder has them in.
"""

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def main(source: str, folder: str, out: str, dtype: str) -> None:
    sys.path[:0] = [source, str(Path(source) / "gguf-py")]
    import conversion.base
    import conversion.mamba

    of_digest = conversion.base.TextModel.get_vocab_base_pre

    def known(model: Any, tokenizer: Any) -> str:
        try:
            return of_digest(model, tokenizer)
        except NotImplementedError as error:
            if splits_as_gpt2(Path(folder)):
                return "gpt-2"
            raise RuntimeError("it does not know how this tokenizer splits texts into words") from error

    conversion.base.TextModel.get_vocab_base_pre = known
    conversion.base.ModelBase.load_hparams = staticmethod(
        lambda place, is_mistral_format=False: json.loads((Path(place) / "config.json").read_text(encoding="utf-8"))
    )
    for kind in (conversion.mamba.MambaModel, conversion.mamba.Mamba2Model):  # with A_log in float32
        kind.modify_tensors = lambda model, tensor, name, layer, modify=kind.modify_tensors: modify(
            model, tensor.float() if name.endswith(".A_log") else tensor, name, layer
        )
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outtype", dtype, "--outfile", out, "--model-name", "model"]
    runpy.run_path(str(Path(source) / "convert_hf_to_gguf.py"), run_name="__main__")
    compare(Path(folder), out)


def splits_as_gpt2(folder: Path) -> bool:
    """Whether a tokenizer is byte-level BPE with GPT-2's words, and nothing besides."""
    try:
        settings = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    words, model = settings.get("pre_tokenizer") or {}, settings["model"]
    usual = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return (
        settings.get("normalizer") is None
        and words.get("type") == "ByteLevel"
        and words.get("use_regex", True)
        and not words.get("add_prefix_space", True)
        and all(model.get(field) in (value, "" if value is None else value) for field, value in usual.items())
        and not (model.get("byte_fallback") or model.get("ignore_merges"))
    )


def compare(folder: Path, file: str) -> None:
    """Raises RuntimeError unless a GGUF holds the folder's tensors, each with the same values, and nothing besides. Within a
    head of queries and keys, numbers may have another order, the converter's for positions, if it is one for both."""
    import gguf
    import torch
    from conversion.llama import LlamaModel

    reader: Any = gguf.GGUFReader(file)
    present = {tensor.name: tensor for tensor in reader.tensors}
    architecture = reader.get_field("general.architecture").contents()
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, reader.get_field(f"{architecture}.block_count").contents())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = {"q_proj": config.get("num_attention_heads"), "k_proj": config.get("num_key_value_heads")}
    embedding, ordered = None, set()
    for name, value in values(folder):
        known = names.get_name(name.replace(".dt_bias", ".dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        if known == "token_embd.weight":
            embedding = value
        if known == "output.weight" and known not in present and embedding is not None and torch.equal(value, embedding):
            continue  # the reader takes the embedding
        tensor = present.pop(known, None)
        if tensor is None:
            raise RuntimeError(f"the file does not hold '{name}'")
        stored = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).flatten()
        same = torch.equal(stored, (-value.exp() if name.endswith(".A_log") else value).flatten())
        if count := heads.get(name.removesuffix(".weight").rpartition(".")[2]):
            ordered.add(same)
            same = same or torch.equal(stored, LlamaModel.permute(value, count, count).flatten())
        if not same:
            raise RuntimeError(f"'{name}' has other values in the file")
    if len(ordered) > 1:
        raise RuntimeError("queries and keys have another order of numbers in the file, and not the same one")
    if present:
        raise RuntimeError(f"the file also holds '{min(present)}'")


def values(folder: Path) -> Iterator[tuple[str, "Tensor"]]:
    """The folder's tensors in float32, the embedding first."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in sorted(opened.keys(), key=lambda name: ("embed" not in name, name)):
                yield name, opened.get_tensor(name).float()


if __name__ == "__main__":
    main(*sys.argv[1:])
