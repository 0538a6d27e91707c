"""A complete Hugging Face folder, with the modeling code for where this package is not installed."""

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.exporting.verify import Reader
from surgery.hybrids.spliced import without_code, written
from surgery.records.plan import Plan
from surgery.splicing.remembered import BASE

USE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("NAME", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("NAME", trust_remote_code=True)"""
READER = Reader("transformers", "code in the folder")
QUANTISED = True


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
        written(hybrid)(folder, max_shard_size=max_shard_size)
    except ValueError as error:
        raise UserError(f"cannot write the weights: {' '.join(str(error).split())}") from error
    (folder / BASE).unlink(missing_ok=True)  # export.json says which base it is, and may say better
    without_code(tokenizer).save_pretrained(folder)
