"""What `surgery table` prints, as one suite: those that its columns come from."""

from transformers import PreTrainedTokenizerBase

from surgery.records.recipe import Bench, Data
from surgery.runtime.progress import say

PLACE = 90
SUITES = {
    "table": "The columns of `surgery table`: ruler and speed, and, where bench.data_path is given, documents and zeroshot.",
    "table_quick": "The same in minutes, unless set otherwise: 20 examples a task, 50 of standard ones, 512 and 1,024 tokens.",
}
LENGTHS = "also"
OF_DATA = ("documents", "zeroshot")


def groups(options: Bench) -> dict[str, tuple[str, ...]]:
    return {"table": ("ruler", "speed") if options.data_path is None else ("ruler", "speed", *OF_DATA)}


def check_inputs(options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> None:
    """Say what is left out."""
    missing = [suite for suite in OF_DATA if suite not in options.suites]
    if "table" in options.suites and options.data_path is None and missing:
        say(f"not measured: {' and '.join(missing)}; bench.data_path names the folder of their data")
