"""Text that a model is tuned on, and measured on: the built-in toy data, files, folders of files, data sets of the Hub.

Files are read by plain readers, which open nothing but the file itself. Only an explicit id of the Hub, OWNER/NAME, makes the
package datasets look for it.

A sixteenth of every source is kept back from training: of documents by a hash of their text, so that copies stay on one side;
of a text file its end. Every row depends on the seed and its number alone, so a run that is resumed sees what the uninterrupted
one would have seen, and every process can make every row.
"""

import csv
import hashlib
import io
import json
import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.probes.toy import document
from surgery.probes.toy_tokenizer import is_toy_tokenizer
from surgery.records.recipe import HUB_ID, TOY
from surgery.runtime.files import read_text

KEPT_BACK = 16  # one part in so many
STRETCH = 32  # of a long document, at most this many characters a token of a row are tokenised
TRIES = 1000  # documents that are drawn in search of one that fits
PLAIN, TABLES = (".txt", ".md"), (".jsonl", ".csv", ".parquet")


@dataclass(frozen=True)
class Source:
    """The documents of one source. divided: each of them has a part that is kept back, as text files have; otherwise whole
    documents are kept back."""

    name: str
    documents: Sequence[str] = field(repr=False)
    divided: bool

    @cached_property
    def digest(self) -> str:
        """sha256 of the text, the same for the same text under another name."""
        whole = hashlib.sha256()
        for text in self.documents:
            whole.update(f"{len(text)}:".encode() + text.encode("utf-8", "surrogatepass"))
        return whole.hexdigest()

    @cached_property
    def sides(self) -> dict[bool, list[str]]:
        """The texts to train on (False), and those that are kept back (True), without what is nothing but white space."""
        sides: dict[bool, list[str]] = {False: [], True: []}
        for text in self.documents:
            if self.divided:
                border = len(text) - len(text) // KEPT_BACK
                sides[False].append(text[:border])
                sides[True].append(text[border:])
            else:
                sides[zlib.crc32(text.encode("utf-8", "surrogatepass")) % KEPT_BACK == 0].append(text)
        return {side: [text for text in texts if text.strip()] for side, texts in sides.items()}

    @cached_property
    def weights(self) -> dict[bool, list[int]]:
        """How often each text is drawn, summed up: a file as often as it is long, all other documents alike."""
        return {side: list(accumulate(len(t) if self.divided else 1 for t in texts)) for side, texts in self.sides.items()}

    def excerpt(self, tokenizer: PreTrainedTokenizerBase, tokens: int, rng: random.Random, kept_back: bool) -> list[int]:
        """At most `tokens` token ids: a random window of a document, or all of a short one. Raises UserError without text."""
        if self.name == TOY:  # documents joined by the token that ends a text, as the built-in models have learnt them
            joined: list[int] = []
            while len(joined) < tokens:
                text = document(rng, held_out=False)  # the toy data's own held-out documents are for bench
                if (zlib.crc32(text.encode()) % KEPT_BACK == 0) == kept_back:
                    joined += tokenizer((tokenizer.eos_token or "") + text, add_special_tokens=False)["input_ids"]
            return joined[:tokens]
        texts = self.sides[kept_back]
        if not texts:
            what = "that is kept back from training" if kept_back else "to train on"
            raise UserError(f"{self.name} holds no text {what} (one part in {KEPT_BACK} is kept back)")
        (text,) = rng.choices(texts, cum_weights=self.weights[kept_back])
        longest = STRETCH * tokens
        is_cut = len(text) > longest
        if is_cut:
            start = rng.randrange(len(text) - longest + 1)
            stretch = text[start : start + longest]
            text = stretch.partition(" ")[2].rpartition(" ")[0] or stretch  # whole words
        ids = tokenizer(text, add_special_tokens=not (is_cut or self.divided), verbose=False)["input_ids"]
        begin = rng.randrange(max(1, len(ids) - tokens + 1))
        return ids[begin : begin + tokens]


def knows(names: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a model may know these texts or facts: the built-in toy data is known to the built-in models alone."""
    return TOY not in names or is_toy_tokenizer(tokenizer)


def check_known(names: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for the built-in toy data and a model that does not know it."""
    if not knows(names, tokenizer):
        raise UserError(
            "the model does not know the built-in toy data; name a file of text of the kind that it knows: "
            "--set data.train_text=[FILE]"
        )


def open_text(names: Sequence[str], column: str = "text") -> list[Source]:
    """Read sources of text: toy, files, folders, ids of the Hub. Raises UserError, in one line, for what holds no text.

    column: the field of a document that holds its text, in .jsonl, .csv and .parquet files and on the Hub.
    """
    sources = []
    for name in names:
        path, divided = Path(name), False
        if name == TOY:
            sources.append(Source(TOY, (), divided=False))
            continue
        if path.is_dir():
            # A README describes the data; it is none of it.
            files = sorted(file for file in path.rglob("*") if file.suffix in PLAIN + TABLES and file.stem.lower() != "readme")
            plain = [file for file in files if file.suffix in PLAIN]
            if plain and len(plain) < len(files):
                raise UserError(f"{name} holds text files and tables; name one kind of them")
            texts, divided = [text for file in files for text in _read(file, column)], bool(plain)
        elif path.exists() or path.suffix in PLAIN + TABLES:
            texts, divided = _read(path, column), path.suffix not in TABLES
        elif HUB_ID.fullmatch(name):
            texts = _read_hub(name, column)
        else:
            raise UserError(f"there is no file '{name}', and an id of the Hub has the form OWNER/NAME")
        if not any(text.strip() for text in texts):
            raise UserError(f"{name} holds no text")
        sources.append(Source(name, texts, divided))
    return sources


def _read(path: Path, column: str) -> list[str]:
    """The documents of one file."""
    if path.suffix == ".parquet":
        return _read_parquet(path, column)
    text = read_text(path)
    if path.suffix == ".jsonl":
        documents = []
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    documents.append(_field(json.loads(line), column, f"{path}, line {number}"))
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{path}, line {number} is no JSON") from error
        return documents
    if path.suffix == ".csv":
        csv.field_size_limit(2**31 - 1)
        try:
            rows = list(csv.DictReader(io.StringIO(text, newline="")))
        except csv.Error as error:
            raise UserError(f"{path} is no CSV file: {error}") from error
        return [_field(row, column, f"{path}, row {number}") for number, row in enumerate(rows, 1)]
    return [text]


def _field(entry: Any, column: str, where: str) -> str:
    """The text of a document; None counts as an empty one."""
    if not isinstance(entry, dict):
        raise UserError(f"{where} is no document: it needs an object with the field '{column}'")
    if column not in entry:
        raise UserError(f"{where} has no field '{column}' (data.column); it has {', '.join(map(str, entry)) or 'none'}")
    if entry[column] is not None and not isinstance(entry[column], str):
        raise UserError(f"{where}: the field '{column}' has to be text, not {type(entry[column]).__name__}")
    return entry[column] or ""


def _read_parquet(path: Path, column: str) -> list[str]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"to read {path}, install the package pyarrow") from error
    if not path.is_file():
        raise UserError(f"cannot read {path}: there is no such file")
    try:
        table = pyarrow.parquet.ParquetFile(path)
        if column not in table.schema_arrow.names:
            raise UserError(f"{path} has no field '{column}' (data.column); it has {', '.join(table.schema_arrow.names)}")
        values = table.read(columns=[column])[column].to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    return [_field({column: value}, column, f"{path}, row {number}") for number, value in enumerate(values, 1)]


def _read_hub(name: str, column: str) -> list[str]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"to read {name}, install the package datasets") from error
    try:
        loaded = datasets.load_dataset(name, split="train")
    except Exception as error:  # whatever network, library or data set do wrong
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"cannot load the data set {name}: {reason}") from error
    return [_field({**entry}, column, f"{name}, row {number}") for number, entry in enumerate(loaded, 1)]


def text_rows(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    numbers: Iterable[int],
    seed: int,
    kept_back: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rows of text by their numbers: ids (rows, tokens), and positions (rows, tokens) that begin again with every document of a
    row, or None where every row is one document.

    Each row draws one source, all alike often, and is filled with excerpts; the last one is cut to fit. Raises UserError where
    documents are shorter than two tokens.
    """
    rows, places, one_each = [], [], True
    for number in numbers:
        rng = random.Random(f"text {seed} {number} {kept_back}")
        source = sources[rng.randrange(len(sources))]
        row: list[int] = []
        place: list[int] = []
        for _ in range(TRIES):
            ids = source.excerpt(tokenizer, tokens, rng, kept_back)[: tokens - len(row)]
            if len(ids) >= min(2, tokens - len(row)):
                row, place = row + ids, place + list(range(len(ids)))
            if len(row) == tokens:
                break
        else:
            raise UserError(f"{source.name}: {TRIES} documents do not fill a row of {tokens} tokens; choose fewer")
        rows.append(row)
        places.append(place)
        one_each &= place[-1] == tokens - 1
    return torch.tensor(rows), None if one_each else torch.tensor(places)


# Overlap of texts. Only letters and digits count, in lower case, so that line ends, wrapping and punctuation do not matter.
WINDOW = 64  # letters: about 13 words, as contamination of benchmarks is usually measured
SOUGHT = 2**14  # windows of the measured text, evenly spaced
TOLERATED = 0.05  # licences, headings and quotations; two novels by different authors share .00001
LIMIT = 2**28  # characters of a source that are read
PIECE, OVERLAP = 2**20, 2**10  # characters that are hashed at once, and those that two such pieces share


def check_apart(held_out: str, sources: Sequence[Source], characters: int | None = None) -> None:
    """Raise UserError if more than TOLERATED of a held-out text (its first `characters`) is also in a source to train on."""
    sought = _window_hashes(held_out[:characters])
    if not len(sought):
        return
    sought = np.unique(sought[np.linspace(0, len(sought) - 1, SOUGHT).astype(int)])
    for source in sources:
        shared = np.zeros(len(sought), bool)
        read = 0
        for text in source.documents:
            for start in range(0, min(len(text), LIMIT - read), PIECE):
                shared |= np.isin(sought, _window_hashes(text[start : start + PIECE + OVERLAP]))
            read += len(text)
            if read >= LIMIT:
                break
        if shared.mean() > TOLERATED:
            raise UserError(
                f"{shared.mean():.0%} of the held-out text is also in {source.name}, which is trained on; "
                "data.held_out_text has to be other text"
            )


def _window_hashes(text: str) -> np.ndarray:
    """A hash of every window of WINDOW letters, by sums modulo 2^64: that of letters times powers of an odd base."""
    letters = np.frombuffer("".join(filter(str.isalnum, text.lower())).encode("utf-8", "surrogatepass"), np.uint8)
    if len(letters) < WINDOW:
        return np.empty(0, np.uint64)
    rng = np.random.default_rng(0)
    values, base = rng.integers(0, 2**64, 256, np.uint64), np.uint64(int(rng.integers(0, 2**63)) * 2 + 1)
    inverse = np.uint64(pow(int(base), -1, 2**64))
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(len(letters), base), dtype=np.uint64)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values[letters] * powers, dtype=np.uint64)])
        shifts = np.cumprod(np.full(len(letters) - WINDOW + 1, inverse), dtype=np.uint64)
        return (sums[WINDOW:] - sums[:-WINDOW]) * shifts
