"""Text in which rare tokens have other names: in every document anew, and alike throughout it.

A base knows the names of the text that it was trained on by heart. A recall hit of such text is predicted without a look at the
context, so that it teaches nothing about looking there. Where names are exchanged, the context alone says what comes: as in the
anonymised stories of Hermann et al. (arXiv 1506.03340, section 2.2), which reading was to be learnt from, and not knowledge.

A token is exchanged for another of the same kind: both of letters of one script, with or without a space before them, and with
or without a capital. All tokens of a kind are permuted, so different tokens stay different, and what occurred twice still
does.
"""

import random
import unicodedata

import numpy as np
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.probes.hits import PairCounts

BEFORE = "a"  # put before a token while it is decoded: some tokenizers drop a space at the very beginning


class Renaming:
    """Exchanges the tokens that occur at most `rare` times per million in the text of `pairs`.

    Raises UserError where the tokenizer has no two such tokens of one kind."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pairs: PairCounts, rare: float):
        kinds = token_kinds(tokenizer)
        is_rare = pairs.token_counts(len(kinds))[: len(kinds)] <= rare * pairs.tokens / 1e6
        groups = [np.flatnonzero(is_rare & (kinds == kind)) for kind in np.unique(kinds[kinds >= 0])]
        self.groups = [group for group in groups if len(group) > 1]
        if not self.groups:
            raise UserError(
                "tune.rename: no two tokens of one kind, of letters alone and rare in data.train_text, could be exchanged; "
                "take a larger rename.rare, or leave rename out"
            )

    def __call__(self, ids: list[int], rng: random.Random) -> list[int]:
        """The document with other names. ids: token ids; those of tokens that the tokenizer does not know stay as they are."""
        generator = np.random.default_rng(rng.getrandbits(64))
        names = np.arange(max((*ids, *(group[-1] for group in self.groups))) + 1)
        for group in self.groups:
            names[group] = generator.permutation(group)
        return names[np.asarray(ids, dtype=np.int64)].tolist()


def token_kinds(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """(tokens,): the number of each token's kind; -1 of tokens that are not of letters alone, or do not exist."""
    before = tokenizer(BEFORE, add_special_tokens=False)["input_ids"]
    start = str(tokenizer.decode(before))
    numbers: dict[tuple[bool, bool, str], int] = {}
    added, known = set(tokenizer.added_tokens_decoder), sorted(tokenizer.get_vocab().values())
    kinds = np.full(known[-1] + 1, -1)
    for token, word in zip(known, tokenizer.batch_decode([[*before, token] for token in known]), strict=True):
        text = word.removeprefix(start)
        letters = text.removeprefix(" ")
        if letters.isalpha() and token not in added:
            script = unicodedata.name(letters[0], "").partition(" ")[0]
            kinds[token] = numbers.setdefault((text != letters, letters[0].isupper(), script), len(numbers))
    return kinds
