"""The complete Hugging Face folder: weights, tokenizer, generation settings, and the modeling code for where this package is
not installed."""

from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.export.verify import CLOSE, compare
from surgery.plan import Plan

TOLERANCE = CLOSE
USE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("NAME", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("NAME", trust_remote_code=True)"""


def write(
    hybrid: PreTrainedModel,
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    base: str,
    max_shard_size: str = "5GB",
) -> None:
    """max_shard_size: weights beyond it are divided into several files of at most this size ("500MB", "5GB")."""
    try:
        hybrid.save_pretrained(folder, max_shard_size=max_shard_size)
    except ValueError as error:
        raise UserError(f"cannot write the weights: {' '.join(str(error).split())}") from error
    tokenizer.save_pretrained(folder)


def verify(hybrid: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> float:
    """Reload from disk, and compare."""
    return compare(hybrid, AutoModelForCausalLM.from_pretrained(folder, dtype=hybrid.dtype), len(tokenizer))
