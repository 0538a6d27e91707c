"""What the built-in models learn from: dictionaries of a growing number of pairs, documents, numbers told in documents, and
lettered questions."""

import random
from collections.abc import Iterator

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.pretraining.recipe import Curriculum, PretrainRecipe
from surgery.probes import needle
from surgery.probes.letters import lettered
from surgery.tuning.sequences import EvidenceSpan, Piece, collate, kv_pieces
from surgery.world.facts import facts
from surgery.world.text import document
from surgery.world.words import KEYS

MOST_NEEDLES = 8  # numbers told in a document
LETTER_QUESTIONS = 6  # of a sequence


class Progress:
    """How far the curriculum has come. A pair is added whenever the running loss falls below the threshold; the curriculum is
    done when that happens with the largest size."""

    def __init__(self, options: Curriculum):
        self.options, self.most, self.running, self.done = options, options.first, 5.0, False

    def record(self, loss: float) -> None:
        self.running = 0.95 * self.running + 0.05 * loss
        if self.running < self.options.threshold:
            self.done = self.most == self.options.last
            if not self.done:
                self.most, self.running = self.most + 1, 3 * self.options.threshold


def dictionaries(recipe: PretrainRecipe, rng: random.Random, most: int) -> list[list[Piece]]:
    """Dictionaries of one random size, of at most `most` pairs, with about `recipe.kv_targets` questions in all."""
    pairs = rng.randint(recipe.curriculum.first, most)
    sequences = max(1, recipe.kv_targets // min(pairs, recipe.queries))
    return [kv_pieces(rng, pairs, recipe.queries, keys="all") for _ in range(sequences)]


def letter_pieces(rng: random.Random, questions: int) -> list[Piece]:
    """Lettered questions with prompts of the training split. The targets are the letters."""
    pieces: list[Piece] = []
    for i, fact in enumerate(rng.choices(facts(), k=questions)):
        question = lettered(rng, fact.question, fact.value, fact.choices, held_out=False)
        pieces += [("\n" * (i > 0) + question.prompt, False), (question.choices[question.answer], True)]
    return pieces


def needle_pieces(rng: random.Random, end: str, sentences: int, needles: int, queries: int) -> list[Piece]:
    """A training document of `sentences` sentences, among which `needles` numbers are told, and at most `queries` questions for
    them, in the words of the probe. The targets are the numbers that are asked for."""
    words, numbers = rng.sample(KEYS, needles), rng.sample(needle.NUMBERS, needles)
    told = [f"{needle.ask(word)} {number}." for word, number in zip(words, numbers, strict=True)]
    parts = [*(document(rng, held_out=False, sentences=1) for _ in range(sentences)), *told]
    rng.shuffle(parts)
    head = end + " ".join(parts)
    pieces: list[Piece] = []
    for i, place in enumerate(rng.sample(range(needles), min(queries, needles))):
        begin = head.index(told[place])
        answer = (f" {numbers[place]}", EvidenceSpan(begin, begin + len(told[place])))
        pieces += [((".\n" if i else f"{head}\n") + needle.ask(words[place]), False), answer]
    return pieces


def text_pieces(rng: random.Random, end: str, sentences: int) -> list[Piece]:
    """A training document, all of it a target."""
    return [(end + document(rng, held_out=False, sentences=sentences), True)]


def haystacks(recipe: PretrainRecipe, rng: random.Random, end: str) -> list[list[Piece]]:
    """Documents in which numbers are told and asked for, of random sizes: those of the probe are of any."""
    return [
        needle_pieces(rng, end, rng.randint(0, recipe.needle_sentences), rng.randint(1, MOST_NEEDLES), recipe.needle_queries)
        for _ in range(recipe.needle_sequences)
    ]


def lesson(
    tokenizer: PreTrainedTokenizerBase, recipe: PretrainRecipe, rng: random.Random, most: int
) -> dict[str, list[list[Piece]]]:
    """The sequences of a step: kind -> sequences."""
    return {
        "kv": dictionaries(recipe, rng, most),
        "text": [text_pieces(rng, tokenizer.eos_token, recipe.text_sentences) for _ in range(recipe.text_sequences)],
        "needles": haystacks(recipe, rng, tokenizer.eos_token),
        "letters": [letter_pieces(rng, LETTER_QUESTIONS) for _ in range(recipe.letter_sequences)],
    }


def batches_of_all_kinds(tokenizer: PreTrainedTokenizerBase, recipe: PretrainRecipe) -> Iterator[Tensor]:
    """Endless batches of token ids (b, t), padded with 0 on the right: the kinds of sequence take turns."""
    rng = random.Random(recipe.seed)
    while True:
        for batch in lesson(tokenizer, recipe, rng, recipe.curriculum.last).values():
            if batch:
                yield collate(tokenizer, batch)[0]
