"""Sources of the text that tuning trains on: the small world, a text file, a folder of text files, the documents of a
JSON-lines file or of a dataset (loaded or streamed).

A source gives excerpts: token ids of one document, or of a random window of a document that is too long. The world's generated
documents and a plain text file, which is one document, give windows of full length; packed_rows.py packs what is shorter.

Excerpt i depends on the source, the seed and i alone, so any process can make any excerpt, and a resumed run sees what the
uninterrupted one would have seen. For the same reason a stream is read in order: to reach excerpt i, the excerpts before it are
passed over without being tokenised.

A sixteenth of every source is held out for measurements during training. Documents are held out by a hash of their text, so
that copies of a document are on the same side; of a text file, also of each in a folder, the end is held out.
"""

import random
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.records.reading import check_plain, parse_json_lines
from surgery.records.recipe import Text
from surgery.records.record import read_text
from surgery.tuning.text_checks import check_documents, check_folder, plain_texts
from surgery.world.text import document

HELD_OUT = 16  # one document in 16
TRIES = 1000  # how many documents are drawn in search of a usable one
STRETCH = 32  # of a long document, at most this many characters per token of an excerpt are tokenised
BLOCK = 1000  # documents of a stream that are shuffled together
BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class Reading:
    """How excerpts are made: at most `tokens` tokens long, from training documents or from held-out ones."""

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    tokens: int
    seed: int
    held_out: bool = False

    @property
    def side(self) -> str:
        return "held out" if self.held_out else "to train on"

    def takes(self, text: str) -> bool:
        """Whether a document is on this side of the split and has text that can be tokenised."""
        return (zlib.crc32(text.encode()) % HELD_OUT == 0) == self.held_out and not text.isspace() and text != ""

    def rng(self, what: str, index: int) -> random.Random:
        return random.Random(f"{'held-out ' * self.held_out}{what} {self.seed} {index}")

    def window(self, text: str, rng: random.Random) -> list[int]:
        """The token ids of a document, or a random window of them if there are more than `tokens`."""
        longest = STRETCH * self.tokens
        if len(text) > longest:
            start = rng.randrange(len(text) - longest + 1)
            stretch = text[start : start + longest]
            text = stretch.partition(" ")[2].rpartition(" ")[0] or stretch  # whole words
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer(text)["input_ids"]
        begin = rng.randrange(max(1, len(ids) - self.tokens + 1))
        return ids[begin : begin + self.tokens]


class Source(Protocol):
    """full_length: whether every excerpt has as many tokens as it may have."""

    full_length: ClassVar[bool]

    def excerpt(self, index: int) -> list[int]:
        """Token ids. Raises UserError where the text cannot be read or is too short."""

    def texts(self, documents: int) -> Iterable[str]:
        """Its text on both sides of the split, to be compared with other text. A stream gives what its first `documents`
        usable documents are taken from, the others give everything; the world, which has its own split, gives nothing."""


@dataclass(frozen=True)
class World:
    """Training documents of the small world, joined by end-of-text tokens and cut to windows."""

    full_length: ClassVar[bool] = True
    reading: Reading

    def excerpt(self, index: int) -> list[int]:
        rng = self.reading.rng("window", index)
        ids: list[int] = []
        while len(ids) < self.reading.tokens:
            text = document(rng, held_out=False)  # the world's own held-out documents are for bench
            if self.reading.takes(text):
                end = self.reading.tokenizer.eos_token or ""
                ids += self.reading.tokenizer(end + text, add_special_tokens=False)["input_ids"]
        return ids[: self.reading.tokens]

    def texts(self, documents: int) -> Iterable[str]:
        return ()


@dataclass(frozen=True)
class File:
    """Random windows of a text file."""

    full_length: ClassVar[bool] = True
    path: str
    reading: Reading

    def excerpt(self, index: int) -> list[int]:
        start = self.reading.rng("window", index).randrange(len(self._ids) - self.reading.tokens + 1)
        return self._ids[start : start + self.reading.tokens].tolist()

    def texts(self, documents: int) -> Iterable[str]:
        return (read_text(self.path, "the text in"),)

    @cached_property
    def _ids(self) -> array:
        ids = self.reading.tokenizer(read_text(self.path, "the text in"), add_special_tokens=False)["input_ids"]
        border = len(ids) - len(ids) // HELD_OUT
        part = array("i", ids[border:] if self.reading.held_out else ids[:border])
        if len(part) < self.reading.tokens:
            available = f"{len(part)} of its {len(ids)} tokens are {self.reading.side}"
            raise UserError(f"{self.path} is too short: {available}, and a window needs {self.reading.tokens}")
        return part


@dataclass(frozen=True)
class TextFolder:
    """Random windows of the text files of a folder, each drawn as often as it is long."""

    full_length: ClassVar[bool] = False
    name: str
    paths: list[Path]
    reading: Reading

    def excerpt(self, index: int) -> list[int]:
        rng = self.reading.rng("window", index)
        for _ in range(TRIES):
            (path,) = rng.choices(self.paths, cum_weights=self._sizes)
            text = read_text(path, "the text in")
            border = len(text) - len(text) // HELD_OUT
            part = text[border:] if self.reading.held_out else text[:border]
            if part and not part.isspace():
                return self.reading.window(part, rng)
        raise UserError(f"{self.name} holds no text {self.reading.side}: a sixteenth of each file is held out")

    def texts(self, documents: int) -> Iterable[str]:
        return (read_text(path, "the text in") for path in self.paths)

    @cached_property
    def _sizes(self) -> list[int]:
        return list(accumulate(max(1, check_plain(path, "the text in")) for path in self.paths))


@dataclass(frozen=True)
class Documents:
    """Documents that can be reached by their number. They are drawn at random."""

    full_length: ClassVar[bool] = False
    name: str
    documents: Sequence[Any]
    reading: Reading

    def excerpt(self, index: int) -> list[int]:
        rng = self.reading.rng("document", index)
        for _ in range(TRIES):
            text = _text(self.documents[rng.randrange(len(self.documents))], self.name)
            if self.reading.takes(text):
                return self.reading.window(text, rng)
        raise UserError(_no_text(self.name, self.reading))

    def texts(self, documents: int) -> Iterable[str]:
        return (_text(document, self.name) for document in self.documents)


class Stream:
    """Documents in the order of a stream, shuffled within blocks of successive ones; from the start again when they end."""

    full_length: ClassVar[bool] = False

    def __init__(self, name: str, documents: Any, column: str, reading: Reading):
        self.name, self.documents, self.column, self.reading = name, documents, column, reading
        self._next, self._texts = 0, self._endless()

    def excerpt(self, index: int) -> list[int]:
        if index < self._next:
            self._next, self._texts = 0, self._endless()
        for text in self._texts:
            self._next += 1
            if self._next > index:
                return self.reading.window(text, self.reading.rng("document", index))
        raise UserError(_no_text(self.name, self.reading))

    def texts(self, documents: int) -> Iterable[str]:
        entries = iter(self.documents)
        while documents > 0 and (block := self._block(entries)):
            texts = [_text(entry[self.column], self.name) for entry in block]
            documents -= sum(map(self.reading.takes, texts))
            yield from texts

    def _endless(self) -> Iterator[str]:
        for epoch in count():
            entries, taken = iter(self.documents), 0
            while block := self._block(entries):
                texts = [_text(entry[self.column], self.name) for entry in block]
                texts = [text for text in texts if self.reading.takes(text)]
                taken += len(texts)
                self.reading.rng(f"block {epoch}", taken).shuffle(texts)
                yield from texts
            if not taken:
                return

    def _block(self, entries: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        with _loading(self.name):
            return list(islice(entries, BLOCK))


def open_source(text: Text, reading: Reading) -> Source:
    """The source that a recipe names. Raises UserError where there is nothing to read."""
    path = Path(text.source)
    if text.source == "world":
        _has_no(text, "column", "subset", "split", "streaming")
        return World(reading)
    if path.suffix not in BUILDERS and (path.is_file() or path.suffix == ".txt"):
        _has_no(text, "column", "subset", "split", "streaming")
        return File(text.source, reading)
    if path.is_dir() and (texts := plain_texts(path)):
        _has_no(text, "column", "subset", "split", "streaming")
        return TextFolder(text.source, texts, reading)
    if path.suffix == ".jsonl" and not text.streaming:
        _has_no(text, "subset", "split")
        return Documents(text.source, _json_lines(text), reading)
    return _open_dataset(text, reading)


def _has_no(text: Text, *options: str) -> None:
    """Refuse options that would be ignored."""
    for option in options:
        if (value := getattr(text, option)) != Text.model_fields[option].default:
            raise UserError(f"data.train_text: '{text.source}' has no {option}, but {value!r} is given")


def _json_lines(text: Text) -> list[Any]:
    documents = []
    for number, entry in parse_json_lines(read_text(text.source, "the documents in"), text.source, any_text=True):
        if not isinstance(entry, dict):
            raise UserError(f"{text.source}, line {number}: needs an object with a column '{text.column}'")
        _has_column(text, list(entry), f"line {number}")
        documents.append(entry[text.column])
    if not documents:
        raise UserError(f"{text.source} holds no documents")
    return documents


def _open_dataset(text: Text, reading: Reading) -> Source:
    """A source read by the package datasets, which runs no code that comes with a dataset."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"to read {text.source}, install the package datasets: pip install 'mamba-surgery[data]'") from error
    where: dict[str, Any] = {"path": text.source, "name": text.subset}
    if (path := Path(text.source)).suffix in BUILDERS:
        _has_no(text, "subset")
        where = {"path": BUILDERS[path.suffix], "data_files": text.source}
        check_documents(path)
    elif path.is_dir():
        check_folder(path)
    with _loading(text.source):
        loaded = datasets.load_dataset(**where, split=text.split, streaming=text.streaming)
        first = next(iter(loaded), None)
    if first is None:
        raise UserError(f"{text.source} holds no documents (split '{text.split}')")
    _has_column(text, list(first), f"split '{text.split}'")
    if text.streaming:
        return Stream(text.source, loaded.select_columns([text.column]), text.column, reading)
    return Documents(text.source, loaded[text.column], reading)


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """One clear line for whatever the network, the file system or a damaged file does wrong."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"cannot load the dataset {name}: {reason}") from error


def _has_column(text: Text, columns: list[str], where: str) -> None:
    if text.column not in columns:
        raise UserError(f"{text.source} ({where}) has no column '{text.column}'; it has {', '.join(columns) or 'none'}")


def _text(value: Any, name: str) -> str:
    if value is not None and not isinstance(value, str):
        raise UserError(f"{name}: a document has to be text, not {type(value).__name__}")
    return value or ""


def _no_text(name: str, reading: Reading) -> str:
    return f"{name} holds no text {reading.side}: one document in {HELD_OUT} is held out, and empty ones are passed over"
