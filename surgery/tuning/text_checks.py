"""What is looked at before the package datasets reads a file or a folder, which some of them would end or occupy for hours."""

import os
from itertools import islice
from pathlib import Path

from surgery.errors import UserError
from surgery.records.reading import check_plain, parse_json, shown
from surgery.records.record import read_text

MOST_FILES = 100_000  # of a folder that is a data set
FORMATS = {".jsonl", ".json", ".csv", ".parquet", ".txt", ".arrow", ".zip", ".tar", ".gz", ".zst"}
LONGEST = 2**28  # bytes of a document


def check_documents(path: Path) -> None:
    """Raise UserError for a file that is not what its name ends with. A line `null` in a JSON file, or deep nesting, would
    end the process, so all of it is read, line by line; an array is read whole."""
    check_plain(path, "the documents in")
    if path.suffix == ".csv":
        with path.open("rb") as file:
            if b"\0" in file.read(2**20):
                raise UserError(f"cannot read the documents in {path}: it is no text, it holds NUL")
    elif path.suffix in (".json", ".jsonl"):
        _check_json(path)


def _check_json(path: Path) -> None:
    with path.open("rb") as file:
        whole = file.read(1024).lstrip()[:1] == b"["
        file.seek(0)
        if whole:
            entries = parse_json(read_text(path, "the documents in"), str(path), any_text=True)
            others = [entry for entry in entries if not isinstance(entry, dict)]
            if others:
                raise UserError(f"{path}: every document is an object with its text in a column, not {shown(others[0])}")
            return
        for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
            place = f"{path}, line {number},"
            if len(line) > LONGEST:
                raise UserError(f"{place} has more than {LONGEST:,} bytes")
            try:
                content = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{place} is not UTF-8 at byte {error.start}") from error
            if content.strip() and not isinstance(entry := parse_json(content, place, any_text=True), dict):
                raise UserError(f"{place} is no object with a document in a column, but {shown(entry)}")


def check_folder(folder: Path) -> None:
    """Raise UserError for a folder that is no data set: to look for one in a whole disk takes hours."""
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    looked_at = list(islice(files, MOST_FILES + 1))
    if len(looked_at) > MOST_FILES:
        raise UserError(f"data.train_text: {folder} holds more than {MOST_FILES:,} files; name the data set's own folder")
    if not any({*path.suffixes} & FORMATS for path in looked_at):
        raise UserError(f"data.train_text: the folder {folder} holds no file of {', '.join(sorted(FORMATS))}")
