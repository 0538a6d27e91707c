"""Training sequences: dictionaries with many queries, world text, lettered questions.

A sequence is a list of pieces, each with a flag that says whether its tokens are targets. Pieces are tokenised one by one, as
the probes do, so that a value is the same tokens in training as in the probe. Item i of a dataset depends on the seed and i
alone, so any process can make any part of it, and a resumed run sees what the uninterrupted one would have seen.
"""

import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.probes.kv import OPENING, ask, dictionary
from surgery.probes.letters import lettered
from surgery.world.facts import facts
from surgery.world.text import document

Piece = tuple[str, bool]
IGNORE = -100


def kv_pieces(rng: random.Random, pairs: int, queries: int) -> list[Piece]:
    """A dictionary followed by at most `queries` questions about it; the values asked for are the targets.

    No key is asked for twice: the second answer could be copied from the first, which is not what the probe measures.
    """
    entries = dictionary(rng, pairs)
    head = OPENING + "".join(f"{key}:{value}\n" for key, value in entries.items())
    pieces: list[Piece] = []
    for i, key in enumerate(rng.sample(list(entries), min(queries, pairs))):
        pieces += [((head if i == 0 else "\n") + ask(key), False), (entries[key], True)]
    return pieces


def letter_pieces(rng: random.Random, questions: int) -> list[Piece]:
    """Lettered questions, their prompts from the training split; the letters are the targets."""
    pieces: list[Piece] = []
    for i, fact in enumerate(rng.choices(facts(), k=questions)):
        question = lettered(rng, fact.question, fact.value, fact.choices, held_out=False)
        pieces += [("\n" * (i > 0) + question.prompt, False), (question.choices[question.answer], True)]
    return pieces


def text_pieces(rng: random.Random, end: str, sentences: int) -> list[Piece]:
    """A training document, all of it a target."""
    return [(end + document(rng, held_out=False, sentences=sentences), True)]


class Dictionaries(Dataset[list[Piece]]):
    """`batches` batches of dictionaries; those of a batch have the same number of pairs, between `pairs[0]` and `pairs[1]`."""

    def __init__(self, batches: int, batch_size: int, pairs: tuple[int, int], queries: int, seed: int):
        self.batches, self.batch_size, self.pairs, self.queries, self.seed = batches, batch_size, pairs, queries, seed

    def __len__(self) -> int:
        return self.batches * self.batch_size

    def __getitem__(self, index: int) -> list[Piece]:
        size = random.Random(f"size {self.seed} {index // self.batch_size}").randint(*self.pairs)
        return kv_pieces(random.Random(f"dictionary {self.seed} {index}"), size, self.queries)


class Windows(Dataset[Tensor]):
    """`count` windows of `tokens` tokens: training documents of the world, or random places of a text file."""

    def __init__(self, source: str, tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, seed: int):
        self.source, self.tokenizer, self.count, self.tokens, self.seed = source, tokenizer, count, tokens, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        rng = random.Random(f"window {self.seed} {index}")
        if self.source != "world":
            start = rng.randrange(len(self._file) - self.tokens + 1)
            return self._file[start : start + self.tokens]
        ids: list[int] = []
        while len(ids) < self.tokens:
            ids += self.tokenizer((self.tokenizer.eos_token or "") + document(rng, held_out=False), add_special_tokens=False)[
                "input_ids"
            ]
        return torch.tensor(ids[: self.tokens])

    @cached_property
    def _file(self) -> Tensor:
        try:
            text = Path(self.source).read_text()
        except OSError as error:
            raise UserError(f"cannot read the text in {self.source}: {error.strerror}") from error
        ids = torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) < self.tokens:
            raise UserError(f"{self.source} has {len(ids)} tokens; a window needs {self.tokens}")
        return ids


def collate(tokenizer: PreTrainedTokenizerBase, sequences: Sequence[list[Piece]]) -> tuple[Tensor, Tensor]:
    """Token ids and targets, both (batch, longest), padded on the right; targets[i] is what position i has to predict."""
    flat = [text for pieces in sequences for text, _ in pieces]
    encoded = iter(tokenizer(flat, add_special_tokens=False)["input_ids"])
    ids, targets = [], []
    for pieces in sequences:
        row: list[int] = []
        wanted: list[int] = []
        for _, is_target in pieces:
            tokens = next(encoded)
            row += tokens
            wanted += tokens if is_target else [IGNORE] * len(tokens)
        ids.append(row)
        targets.append([*wanted[1:], IGNORE])
    longest = max(map(len, ids))
    return (
        torch.tensor([row + [0] * (longest - len(row)) for row in ids]),
        torch.tensor([row + [IGNORE] * (longest - len(row)) for row in targets]),
    )
