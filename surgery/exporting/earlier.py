"""Whether an export may take the place of what is at its destination: only where nothing but an earlier export is lost."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from surgery.errors import UserError
from surgery.hybrids.sources import FOLDERS
from surgery.records.plan import PLAN
from surgery.records.reading import parse_json
from surgery.records.record import read_text
from surgery.splicing.remembered import BASE
from surgery.splicing.remembered import EXPORT as RECORD

CARD = "README.md"
# What save_pretrained of a hybrid and of a tokenizer writes, beside the modeling code; such a folder has no record.
SAVED = (
    PLAN, BASE, "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "spiece.model", "chat_template.jinja",
)  # fmt: skip


def check_replaceable(path: Path, overwrite: bool = True) -> None:
    """Raise UserError unless `path` is free, an empty folder, or, with `overwrite`, an earlier export that holds no file of
    somebody else."""
    try:
        if not path.exists():
            return
        if Path.cwd().is_relative_to(path.resolve()):
            raise UserError(f"{path} is the current folder, or holds it, and cannot be replaced; choose another place")
        names = sorted(file.name for file in path.iterdir()) if path.is_dir() else None
        if names == []:
            return
        # A plan alone may lie beside the ranking that it was made of, or where a user has put it.
        if names is None or (RECORD not in names and not {PLAN, "config.json"} <= {*names}):
            raise UserError(f"{path} exists and is not an earlier export; choose another place")
        own = _written(path / RECORD)
        others = _others(names, [name.partition("/")[0] for name in own])  # first: a home is not read to its end
        others = others or _others((file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()), own)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    if not others and not overwrite:
        raise UserError(f"{path} holds an earlier export: --overwrite replaces it (or choose another --out)")
    if others:
        more = f" and {len(others) - 1} more" if others[1:] else ""
        raise UserError(f"{path} also holds '{others[0]}'{more}, which no export wrote; move that away or choose another place")


def _written(record: Path) -> list[str]:
    """Patterns of the names of what an export wrote, by its record; where there is none, of what save_pretrained writes."""
    try:
        if not record.exists():
            of_export = []
        else:
            return [*parse_json(read_text(record), str(record))["files"], RECORD, CARD, PLAN]
    except (UserError, KeyError, TypeError):  # a damaged one
        of_export = [RECORD, CARD, "*.png", "report.*", "recipe.yaml"]
    package = Path(__file__).parent.parent / "hybrids"
    return [*SAVED, *of_export, *(file.name for folder in FOLDERS for file in (package / folder).glob("*.py"))]


def _others(names: Iterable[str], own: list[str]) -> list[str]:
    return sorted(name for name in names if not any(fnmatchcase(name, pattern) for pattern in own))
