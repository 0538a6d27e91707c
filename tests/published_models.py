"""Awkward checkpoints: tiny random ones that lie on the disk as the published ones do.

Each has a published configuration, word by word with its sizes cut, stored in a precision and a layout, with a tokenizer of
a kind that real models have. Gathered from what public repositories quote of the Hub's config.json files, and from
transformers' sources of 4.39 to 5.14, which wrote them.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    FalconMambaForCausalLM,
    Mamba2ForCausalLM,
    MambaForCausalLM,
    PreTrainedModel,
)

from surgery.hybrids.llamba import LlambaForCausalLM
from surgery.serving.original_config import original_config
from surgery.world.tokenizer import _corpus
from tools.published import published

FLAGS = {"rescale_prenorm_residual": False, "residual_in_fp32": True, "use_bias": False, "use_cache": True,
         "use_conv_bias": True, "hidden_act": "silu", "conv_kernel": 4, "layer_norm_epsilon": 1e-05}  # fmt: skip
ORIGINAL = {"rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True}
LLAMBA = {
    "model_type": "llamba", "vocab_size": 128256, "tie_embeddings": True, "pad_vocab_size_multiple": 8, "lm_head_bias": False,
    "d_model": 3072, "n_layer": 28, "resid_dropout": 0.0, "norm_epsilon": 1e-05,
    "mlp_cfg": {"intermediate_size": 8192, "bias": False, "act_fn": "silu"},
    "ssm_cfg": {"d_state": 64, "n_v_heads": 24, "n_qk_heads": 24, "expand": 1, "chunk_size": 128, "activation": "identity",
                "bias": False},
}  # fmt: skip
# Published configurations as their config.json has them, and the sizes that a checkpoint here has instead.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "state-spaces/mamba-130m-hf": (
        published("mamba-130m").config,
        {"d_inner": 32, "d_model": 16, "hidden_size": 16, "intermediate_size": 32, "n_layer": 2, "num_hidden_layers": 2,
         "state_size": 8, "time_step_rank": 2},
    ),
    "mistralai/Mamba-Codestral-7B-v0.1": (
        published("codestral-mamba-7b").config,
        {"head_dim": 16, "hidden_size": 32, "intermediate_size": 64, "n_groups": 2, "num_heads": 4, "num_hidden_layers": 2,
         "state_size": 8, "time_step_rank": 2},
    ),
    # By transformers' own conversion script, without `architectures`, and with the rank of another width.
    "AntonV/mamba2-130m-hf": (
        {
            **FLAGS, "bos_token_id": 0, "chunk_size": 256, "eos_token_id": 0, "expand": 2, "head_dim": 64, "hidden_size": 768,
            "initializer_range": 0.1, "model_type": "mamba2", "n_groups": 1, "num_heads": 24, "num_hidden_layers": 24,
            "pad_token_id": 0, "rms_norm": True, "state_size": 128, "tie_word_embeddings": True,
            "time_step_floor": 0.0001, "time_step_limit": [0.0, math.inf], "time_step_max": 0.1, "time_step_min": 0.001,
            "time_step_rank": 256, "torch_dtype": "float32", "transformers_version": "4.45.0.dev0", "vocab_size": 50288,
        },
        {"head_dim": 16, "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 2, "state_size": 8},
    ),
    # What a trainer of 5.14 saves of it, with what trainers add.
    "a fine-tuned Mamba-2": (
        {
            **FLAGS, "_attn_implementation_autoset": True, "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0,
            "chunk_size": 256, "dtype": "bfloat16", "eos_token_id": 0, "expand": 2, "head_dim": 64, "hidden_size": 768,
            "initializer_range": 0.1, "max_position_embeddings": 2048, "model_type": "mamba2", "n_groups": 1, "num_heads": 24,
            "num_hidden_layers": 24, "pad_token_id": None, "quantization_config": None, "rms_norm": True, "state_size": 128,
            "tie_word_embeddings": True, "time_step_floor": 0.0001, "time_step_limit": [0.0, {"__float__": "Infinity"}],
            "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "tokenizer_class": "GPTNeoXTokenizer",
            "transformers_version": "5.14.0", "unsloth_fixed": True, "unsloth_version": "2026.7.2", "use_cache": False,
            "vocab_size": 50288,
        },
        {"head_dim": 16, "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 2, "state_size": 8},
    ),
    # expand is not intermediate_size / hidden_size, which is 2.
    "tiiuae/falcon-mamba-7b": (
        published("falcon-mamba-7b").config,
        {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 2},
    ),
    "cartesia-ai/Llamba-3B": (
        LLAMBA,
        {"d_model": 32, "n_layer": 2, "mlp_cfg": LLAMBA["mlp_cfg"] | {"intermediate_size": 48},
         "ssm_cfg": LLAMBA["ssm_cfg"] | {"d_state": 8, "n_v_heads": 4, "n_qk_heads": 4}},
    ),
    "state-spaces/mamba-130m": (
        {**ORIGINAL, "d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}, "pad_vocab_size_multiple": 8},
        {"d_model": 16, "n_layer": 2},
    ),
    "state-spaces/mamba2-130m": (
        published("mamba2-130m").config,
        {"d_model": 64, "n_layer": 2},
    ),
}  # fmt: skip
CLASSES: dict[str, Any] = {
    "mamba": MambaForCausalLM, "mamba2": Mamba2ForCausalLM, "falcon_mamba": FalconMambaForCausalLM, "llamba": LlambaForCausalLM,
}  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("one file", "shards")


def original(published: str) -> bool:
    """Whether a published model has the layout of state-spaces."""
    return "model_type" not in PUBLISHED[published][0]


@dataclass(frozen=True)
class PublishedModel:
    """published: of PUBLISHED. layout: of LAYOUTS, and for an original folder its pytorch_model.bin, whatever it says.
    tokenizer: of TOKENIZERS. spare: rows of the vocabulary beyond the tokenizer's, before they are padded."""

    published: str
    dtype: str
    layout: str
    tokenizer: str
    spare: int = 37

    def __str__(self) -> str:
        spare = "" if self.spare else ", no spare rows"
        return f"{self.published}, {self.dtype}, {self.layout}, {self.tokenizer}{spare}"

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        fields, sizes = PUBLISHED[self.published]
        dtype = {name: self.dtype for name in ("torch_dtype", "dtype") if name in fields}
        size = len(tokenizer(self.tokenizer)) + self.spare
        if not original(self.published):  # an original's is padded by its reader
            size = -(-size // 8) * 8 if self.spare else size
        return json.loads(json.dumps(fields | sizes | dtype | {"vocab_size": size}))

    def write(self, folder: Path) -> None:
        """Write it. Where the published model brings no tokenizer (state-spaces, Llamba), it is in the folder `tokenizer`."""
        folder.mkdir(parents=True)
        config = self.config()
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        made = original_config(config) if original(self.published) else AutoConfig.from_pretrained(folder)
        state = random_model(made, getattr(torch, self.dtype)).state_dict()
        if original(self.published):
            named = {name.replace(".embeddings.", ".embedding."): tensor for name, tensor in state.items()}
            torch.save(named, folder / "pytorch_model.bin")
        else:
            save_torch_state_dict(state, folder, max_shard_size="10KB" if self.layout == "shards" else "5GB")
        apart = original(self.published) or made.model_type == "llamba"
        tokenizer(self.tokenizer).save_pretrained(folder / "tokenizer" if apart else folder)

    def tokenizer_in(self, folder: Path) -> Path:
        return folder / "tokenizer" if (folder / "tokenizer").exists() else folder


def random_model(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The stock model of a configuration; the same weights every time. It hardly knows anything, but what it says depends on
    what it reads."""
    torch.manual_seed(0)
    model = CLASSES[config.model_type](config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "in_proj" in name or "x_proj" in name:
                parameter.normal_(std=0.3)
    return model.to(dtype).eval()


def _byte_level(special: list[str]) -> Tokenizer:
    """As GPT-NeoX's and Llama 3's: bytes that have merged, spaces at the beginnings of words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(_some_text(), trainer)
    return made


def _sentencepiece() -> Tokenizer:
    """As the tokenizer.json of Llama 2 and Mistral: a space before the text, spaces as U+2581, digits apart, bytes for what is
    not known."""
    learned = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    learned.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Digits(individual_digits=True)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    learned.train_from_iterator(_some_text(), trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    made = Tokenizer(
        models.BPE(model["vocab"], [tuple(pair) for pair in model["merges"]], unk_token="<unk>", fuse_unk=True,
                   byte_fallback=True)
    )  # fmt: skip
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special[:3]])
    return made


def _some_text() -> list[str]:
    return [text for i, text in enumerate(_corpus()) if i % 12 == 0]


def _neox(folder: Path) -> None:
    _byte_level(["<|endoftext|>"]).save(str(folder / "tokenizer.json"))
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    settings = {"tokenizer_class": "GPTNeoXTokenizer", "add_prefix_space": False, "model_max_length": 1e30, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _llama(folder: Path, bos: bool) -> None:
    made = _sentencepiece()
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "LlamaTokenizer", "add_bos_token": bos, "add_eos_token": False, "legacy": True, "bos_token": "<s>",
        "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None, "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000000000000019884624838656,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _llama3(folder: Path) -> None:
    made = _byte_level(["<|begin_of_text|>", "<|end_of_text|>"])
    begin = ("<|begin_of_text|>", made.token_to_id("<|begin_of_text|>"))
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{begin[0]} $A", pair=f"{begin[0]} $A {begin[0]} $B", special_tokens=[begin]),
        ]
    )
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin[0], "eos_token": "<|end_of_text|>",
        "clean_up_tokenization_spaces": True, "model_max_length": 131072,
        "model_input_names": ["input_ids", "attention_mask"],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _bare(folder: Path) -> None:
    _byte_level([]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


TOKENIZERS: dict[str, Callable[[Path], None]] = {
    "GPT-NeoX": _neox,
    "Llama 2": lambda folder: _llama(folder, bos=True),
    "Llama 2 without BOS": lambda folder: _llama(folder, bos=False),
    "Llama 3": _llama3,  # a BOS, no pad
    "no special tokens": _bare,
}


@cache
def tokenizer(name: str) -> Any:
    """A tokenizer of TOKENIZERS, trained once, and read as it is from a folder."""
    with TemporaryDirectory() as folder:
        TOKENIZERS[name](Path(folder))
        return AutoTokenizer.from_pretrained(folder)


def stock(folder: Path) -> PreTrainedModel:
    """The model by transformers alone."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", config=AutoConfig.from_pretrained(folder)).eval()
