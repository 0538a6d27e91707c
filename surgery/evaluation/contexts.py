"""The lengths of `bench.contexts` that are measured."""

from transformers import PreTrainedTokenizerBase

from surgery.records.recipe import Bench

READING_ALONE = {"speed", "serving", "hits", "length", "ruler"}  # suites that read rows of these lengths, and nothing else
READING = {*READING_ALONE, "quick", "retrieval", "table"}


def readable(options: Bench, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """All that are given; of the default ones, those that the tokenizer's model_max_length allows."""
    given = options.contexts is not None
    return [length for length in options.lengths if given or length <= tokenizer.model_max_length]


def said_of_long(options: Bench, tokenizer: PreTrainedTokenizerBase) -> str:
    """A sentence on the lengths beyond the tokenizer's model_max_length; empty where there are none, or no suite reads them."""
    beyond = [f"{length:,}" for length in options.lengths if length > tokenizer.model_max_length]
    if not beyond or not READING & {*options.suites}:
        return ""
    limit = f"the tokenizer's model_max_length is {tokenizer.model_max_length:,}"
    if options.contexts is None:
        return f"not measured: {', '.join(beyond)} tokens, of the default bench.contexts; {limit}"
    return f"warning: bench.contexts {', '.join(beyond)}: {limit}; models may not know such lengths"
