"""The tokenizer of the built-in models: byte-level BPE in which every word of the toy data has merged into one token.

Any text can be encoded (unknown words fall apart into bytes), and the numbers 0 to 99 are single tokens, as they are for most
large models, so that key-value retrieval can be scored in one forward.
"""

import random
from collections.abc import Iterator
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from surgery.probes.choice import lettered
from surgery.probes.kv import KVRetrieval
from surgery.probes.toy import KEYS, document, facts

END = "<|endoftext|>"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A new one, the same in every process: its corpus is generated from fixed seeds."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_train_toy()),
        bos_token=END,
        eos_token=END,
        pad_token=END,
        padding_side="left",
        model_max_length=2048,
    )


def is_toy_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer is that of the built-in models, which alone know the toy data."""
    own = build_tokenizer().get_vocab()
    return len(tokenizer) == len(own) and tokenizer.get_vocab() == own


@cache
def _train_toy() -> str:
    """A byte-level BPE, as the package tokenizers writes it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,  # more than needed: training ends when there is nothing left to merge, with whole words
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer.to_str()


def _corpus() -> Iterator[str]:
    rng = random.Random("small world, tokenizer")
    for _ in range(2000):
        yield document(rng, held_out=False)
    for fact in facts():
        yield lettered(rng, fact.question, fact.value, fact.choices).prompt
        yield f" {fact.value} {fact.person} {fact.person.lower()}"
    for question in KVRetrieval(pairs=32).questions(300, seed=0):
        yield question.prompt
    for key in KEYS:
        yield f"{key} {key}\n" * 20
    for number in range(100):
        yield f"{number}:" * 20
    for letter in "ABCD":
        yield f"\n{letter}. Answer: {letter}\n" * 20
