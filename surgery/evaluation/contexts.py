"""The lengths of `bench.contexts` that a model reads."""

from transformers import PreTrainedTokenizerBase

from surgery.records.recipe import Bench

READING_ALONE = {"speed", "serving", "hits", "length", "ruler"}  # suites that read rows of these lengths, and nothing else
READING = {*READING_ALONE, "quick", "retrieval", "table"}


def readable(options: Bench, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Those that its tokenizer's model_max_length allows; the others are not measured."""
    return [context for context in options.contexts if context <= tokenizer.model_max_length]


def left_out(options: Bench, tokenizer: PreTrainedTokenizerBase) -> str:
    """A sentence on the lengths that are not measured; empty where all are, or no suite reads them."""
    if not READING & {*options.suites}:
        return ""
    beyond = [str(context) for context in options.contexts if context > tokenizer.model_max_length]
    if not beyond:
        return ""
    return f"not measured: bench.contexts {', '.join(beyond)}; the tokenizer's model_max_length is {tokenizer.model_max_length}"
