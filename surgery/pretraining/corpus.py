"""Plain text of one's own as tokens that a model learns from.

Every file is a document. A document begins with the token that ends a text, and all documents stand one behind the other in a
file of tokens, which is made once, beside the checkpoints of the training, and read by mapping it into memory. A window is a
stretch of it, whatever documents it holds.

The windows of a pass over the text lie side by side, in an order of their own and shifted by another number of tokens in each
pass. Which ones a step sees depends on the step and the seed alone, so that training that is resumed goes on as it would have.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.hybrids.spliced import without_code
from surgery.loading.checkpoint import load_tokenizer
from surgery.loading.hub import one_line
from surgery.models.tokens import tokenizers_errors
from surgery.pretraining.recipe import CorpusOptions
from surgery.probes.hits import PairCounts
from surgery.records.reading import PLAIN_TEXT, check_plain, files_below, parse_json
from surgery.records.record import read_text
from surgery.runtime.ownership.complaints import reason
from surgery.runtime.ownership.replacing import building
from surgery.runtime.progress import Track, busy
from surgery.tuning.leaks import TOLERATED, CheckedText
from surgery.tuning.renaming import Renaming
from surgery.world.tokenizer import byte_level_bpe, wrapped

PIECE = 2**19  # characters that are tokenised at once, about; they end where a line does
RECORD, TRAIN, HELD_OUT = "corpus.json", "train.tokens", "held-out.tokens"
NAMED = 12  # characters of a digest
COUNTED = 2**24  # tokens of which pairs are counted, at most


@dataclass(frozen=True)
class Corpus:
    """tokenizer: of the text. train, held_out: token ids (n,), mapped into memory. about: what corpus.json says: by side the
    number of files, bytes and tokens, and the digest of all that they depend on."""

    tokenizer: PreTrainedTokenizerBase
    train: np.ndarray
    held_out: np.ndarray
    about: dict[str, Any]

    @cached_property
    def pairs(self) -> PairCounts:
        """Of the text that is learnt; of a long one, of the same part of every stretch."""
        step = -(-len(self.train) // COUNTED)
        return PairCounts(part[: len(part) // step] for part in np.array_split(self.train, step))


def prepared(options: CorpusOptions, work: Path) -> Corpus:
    """The corpus that the options name, read from the folder `work` or made there. Raises UserError for files that cannot be
    read, and for held-out text that is also learnt."""
    sides = {"train": files(options.train, "train"), "held_out": files(options.held_out, "held_out")}
    digests = {side: [_digest(path) for path in paths] for side, paths in sides.items()}
    if shared := set(digests["train"]) & set(digests["held_out"]):
        path = sides["held_out"][min(digests["held_out"].index(digest) for digest in shared)]
        raise UserError(f"corpus.held_out: {path} is also learnt from; leave it out of one of the two")
    if options.tokenizer is not None and load_tokenizer(options.tokenizer).eos_token_id is None:  # before anything is written
        raise UserError(f"corpus.tokenizer: {options.tokenizer} has no token that ends a text (eos_token)")
    key = {"tokenizer": options.tokenizer, "vocabulary": None if options.tokenizer else options.vocabulary, **digests}
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:NAMED]
    folder = work / f"corpus-{digest}"
    if not (folder / RECORD).exists():
        _check_apart(sides)
        try:
            with building(folder) as new:
                with new.filling() as temporary:
                    _make(options, sides, digest, temporary)
                _check_length(_read(temporary), options)
                new.replace()
        except OSError as error:
            raise UserError(f"cannot write {folder}: {reason(error)}") from error
    return _read(folder)


def files(places: Iterable[str], key: str) -> list[Path]:
    """The text files that `corpus.<key>` names, those of a folder in the order of their names. Raises UserError where there
    are none."""
    found: list[Path] = []
    for place in map(Path, places):
        if place.is_dir():
            inside = [path for path in files_below(place, f"corpus.{key}") if path.suffix in PLAIN_TEXT]
            if not inside:
                raise UserError(f"corpus.{key}: the folder {place} holds no file of {' or '.join(PLAIN_TEXT)}")
            found += inside
        else:
            check_plain(place, f"the text (corpus.{key})")
            found.append(place)
    return found


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read the text {path}: {error.strerror}") from error


def _check_apart(sides: dict[str, list[Path]]) -> None:
    with busy("comparing the held-out text with the text to learn"):
        share = CheckedText("\n".join(map(_text, sides["held_out"]))).share(map(_text, sides["train"]))
    if share > TOLERATED:
        raise UserError(
            f"corpus.held_out: {share:.0%} of this text is also in corpus.train; at most {TOLERATED:.0%} may be, or the loss "
            "measures memory"
        )


def _check_length(corpus: Corpus, options: CorpusOptions) -> None:
    """Raise UserError for text that is too short to be trained on, or measured."""
    Windows(corpus.train, options.tokens, 0)
    spread(corpus.held_out, options.tokens + 1, 1)


def _make(options: CorpusOptions, sides: dict[str, list[Path]], digest: str, folder: Path) -> None:
    if options.tokenizer is None:
        with busy("training the tokenizer"):
            texts = (piece for path in sides["train"] for piece in _pieces(_text(path)))
            tokenizer: Any = wrapped(byte_level_bpe(texts, options.vocabulary))
    else:
        tokenizer = load_tokenizer(options.tokenizer)
    with tokenizers_errors():
        without_code(tokenizer).save_pretrained(folder)
    dtype = "uint16" if len(tokenizer) <= 2**16 else "uint32"
    about: dict[str, Any] = {"digest": digest, "dtype": dtype}
    for side, name in (("train", TRAIN), ("held_out", HELD_OUT)):
        paths, tokens = sides[side], 0
        with (folder / name).open("wb") as target:
            for path in Track(paths, f"tokenising ({side.replace('_', '-')} text)"):
                for ids in _tokenised(tokenizer, _text(path)):
                    target.write(ids.astype(dtype).tobytes())
                    tokens += len(ids)
        about[side] = {"files": len(paths), "bytes": sum(path.stat().st_size for path in paths), "tokens": tokens}
    (folder / RECORD).write_text(json.dumps(about, indent=2) + "\n")


def _tokenised(tokenizer: Any, text: str) -> Iterator[np.ndarray]:
    """The token ids of a document, in parts."""
    yield np.array([tokenizer.eos_token_id])
    for piece in _pieces(text):
        ids = tokenizer(piece, add_special_tokens=False, truncation=False, return_attention_mask=False)["input_ids"]
        yield np.array(ids, dtype=np.int64)


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces that end where a line does, if it has lines."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE)
        end = min(len(text), start + 2 * PIECE if end < 0 or end > start + 2 * PIECE else end + 1)
        yield text[start:end]
        start = end


def _text(path: Path) -> str:
    return read_text(path, "the text")


def _read(folder: Path) -> Corpus:
    """Raises UserError where anything of it is missing or damaged."""

    def ids(name: str, side: str) -> np.ndarray:
        mapped = np.memmap(folder / name, dtype=about["dtype"], mode="r")
        if len(mapped) != about[side]["tokens"]:
            raise ValueError(f"{name} has {len(mapped)} tokens, not {about[side]['tokens']}")
        return mapped

    try:
        about = parse_json(read_text(folder / RECORD), str(folder / RECORD))
        return Corpus(load_tokenizer(str(folder)), ids(TRAIN, "train"), ids(HELD_OUT, "held_out"), about)
    except (UserError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} is damaged ({one_line(error)}): delete that folder, and it is made again") from error


class Windows:
    """The windows of `tokens` tokens, and the one behind each, that training sees, each with names of its own where `renaming`
    gives them. repeats: the share of them that repeat a passage of their own, of a quarter to a half of the window, until
    they end. Raises UserError for too short a text."""

    def __init__(self, ids: np.ndarray, tokens: int, seed: int, renaming: Renaming | None = None, repeats: float = 0.0):
        self.ids, self.tokens, self.seed, self.renaming, self.repeats = ids, tokens, seed, renaming, repeats
        self.count = (len(ids) - 1) // tokens - 1  # of a pass: one less than there are, for the shift
        if self.count < 1:
            raise UserError(
                f"corpus.train has {len(ids):,} tokens, and windows of {tokens:,} (corpus.tokens) need {2 * tokens + 1:,}"
            )
        self._pass: tuple[int, int, np.ndarray] | None = None

    def batch(self, step: int, size: int) -> Tensor:
        """(size, tokens + 1): what the step with this number sees."""
        numbers = range(step * size, (step + 1) * size)
        windows = _cut(self.ids, [self._start(number) for number in numbers], self.tokens + 1)
        if self.repeats:
            windows = torch.stack([self._repeated(*each) for each in zip(windows, numbers, strict=True)])
        if self.renaming is None:
            return windows
        named = (random.Random(f"names {self.seed} {number}") for number in numbers)
        return torch.tensor([self.renaming(ids, rng) for ids, rng in zip(windows.tolist(), named, strict=True)])

    def _repeated(self, window: Tensor, number: int) -> Tensor:
        rng = random.Random(f"repeats {self.seed} {number}")
        if rng.random() >= self.repeats:
            return window
        passage = rng.randint(max(1, self.tokens // 4), max(1, self.tokens // 2))
        return window[torch.arange(len(window)) % passage]

    def _start(self, number: int) -> int:
        turn, place = divmod(number, self.count)
        if self._pass is None or self._pass[0] != turn:
            rng = np.random.default_rng((self.seed, turn))
            self._pass = turn, int(rng.integers(self.tokens)), rng.permutation(self.count)
        _, shift, order = self._pass
        return shift + self.tokens * int(order[place])


def spread(ids: np.ndarray, tokens: int, most: int) -> Tensor:
    """(windows, tokens): at most `most` windows of a text that do not overlap, spread evenly over it. Raises UserError where
    it has not even one."""
    available = len(ids) // tokens
    if not available:
        raise UserError(f"corpus.held_out has {len(ids):,} tokens, and a window needs {tokens:,} (corpus.tokens)")
    count = min(most, available)
    return _cut(ids, [tokens * (i * available // count) for i in range(count)], tokens)


def _cut(ids: np.ndarray, starts: Sequence[int], length: int) -> Tensor:
    return torch.from_numpy(np.stack([ids[start : start + length] for start in starts]).astype(np.int64))
