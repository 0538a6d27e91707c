"""The small world's tokenizer: byte-level BPE in which every word of the world has merged into one token.

Any text can be encoded (unknown words fall apart into bytes), and the numbers 0 to 99 are single tokens, as they are for most
large models, so that key-value retrieval can be scored in one forward.
"""

import random
from collections.abc import Iterable
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from surgery.probes.kv import KVRetrieval
from surgery.probes.letters import lettered
from surgery.runtime.progress import say
from surgery.world.facts import facts
from surgery.world.text import document
from surgery.world.words import KEYS

END = "<|endoftext|>"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A new one. The same in every process: the corpus is generated from fixed seeds."""
    return wrapped(_trained(), model_max_length=2048)


def is_of_the_world(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer is that of the built-in models, which alone know the small world."""
    own = build_tokenizer().get_vocab()
    return len(tokenizer) == len(own) and tokenizer.get_vocab() == own


def say_of_the_world(tokenizer: PreTrainedTokenizerBase, verb: str) -> None:
    """Say, of a model that does not know the small world, that it is the default of a public function, and what to give."""
    if not is_of_the_world(tokenizer):
        say(
            f"note: surgery.{verb} without data= takes text and facts of the small invented world of the built-in models, "
            'which this one does not know: data=surgery.Data(train_text="train.txt", held_out_text="held_out.txt", '
            'facts="capitals")'
        )


def wrapped(text: str, **options: int) -> PreTrainedTokenizerFast:
    """What byte_level_bpe has made, as transformers takes it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text), bos_token=END, eos_token=END, pad_token=END, padding_side="left", **options
    )


@cache
def _trained() -> str:
    """Trained once in a process: it takes .4 s. The vocabulary is larger than needed, so training ends when there is nothing
    left to merge: whole words."""
    return byte_level_bpe(_corpus(), 8192)


def byte_level_bpe(texts: Iterable[str], vocabulary: int) -> str:
    """A byte-level BPE of at most `vocabulary` tokens, trained on some texts, as the package tokenizers writes it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def _corpus():
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
