"""What is looked at before the package datasets reads a file or a folder, which some of them would end or occupy for hours."""

from pathlib import Path

from surgery.errors import UserError
from surgery.records.reading import PLAIN_TEXT, check_plain, files_below, parse_json, shown
from surgery.records.record import read_text

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
    """Raise UserError for a folder that is no data set."""
    if not any({*path.suffixes} & FORMATS for path in files_below(folder, "data.train_text")):
        raise UserError(f"data.train_text: the folder {folder} holds no file of {', '.join(sorted(FORMATS))}")


def plain_texts(folder: Path) -> list[Path]:
    """The text files of a folder that holds documents in no other form; of another folder, none."""
    files = files_below(folder, "data.train_text")
    others = FORMATS - {*PLAIN_TEXT}
    return [] if any({*path.suffixes} & others for path in files) else [path for path in files if path.suffix in PLAIN_TEXT]
