"""The lengths of `bench.contexts` that are measured."""

from transformers import PreTrainedTokenizerBase

from surgery.records.recipe import Bench


def readable(options: Bench, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """All that are given; of the default ones, those that the tokenizer's model_max_length allows."""
    given = options.contexts is not None
    return [length for length in options.lengths if given or length <= tokenizer.model_max_length]
