"""Publishing: an export goes to the Hub as it was verified, with a card that says what its report says, and is compared there
with what was sent."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from surgery.errors import UserError
from surgery.export import FORMATS
from surgery.export.card import card
from surgery.export.folder import CARD, RECORD, Exported, check
from surgery.export.verify import Proof


@dataclass(frozen=True)
class Published:
    """files: size in bytes of all that was sent, or would be, by name. card: the README.md that goes with it. proof: how it
    was verified when it was written. url: None for a dry run. others: what the repository holds besides."""

    files: dict[str, int]
    card: str
    proof: Proof
    url: str | None = None
    others: tuple[str, ...] = ()


def publish(folder: str | Path, repo: str, *, private: bool = False, dry_run: bool = False) -> Published:
    """Send an export to the repository `repo` ("user/name") of the Hub, which is made if it is not there.

    An upload that was interrupted goes on where it stopped when it is called again: the Hub keeps what it has. The card goes
    last, so that no card stands before an incomplete model. Raises UserError, before anything is sent, if the folder is not as
    it was verified, or its card is not what its report gives; and afterwards if the Hub holds other bytes than this folder.
    """
    folder = Path(folder)
    record = check_export(folder)
    try:
        validate_repo_id(repo)
        if repo.count("/") != 1:
            raise UserError(f"'{repo}' is not a repository of the Hub; write user/name")
        text = card(repo, folder, record, FORMATS[record.format].USE)
        sent = [*record.files, RECORD]
        small = {CARD: text.encode(), RECORD: (folder / RECORD).read_bytes()}  # what the record has no digest of
        sizes = {name: (folder / name).stat().st_size for name in sent} | {CARD: len(small[CARD])}
        if dry_run:
            return Published(sizes, text, record.proof)
        api = HfApi()
        url = str(api.create_repo(repo, private=private, exist_ok=True))
        message = f"Hybrid of {record.base.name}" if record.base.hub else "Hybrid"
        api.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=sent, commit_message=message)
        api.upload_file(repo_id=repo, path_or_fileobj=small[CARD], path_in_repo=CARD, commit_message="Card")
        there = {file.path: file for file in api.list_repo_tree(repo, recursive=True) if isinstance(file, RepoFile)}
    except HFValidationError as error:
        raise UserError(f"'{repo}' is not a repository of the Hub: {_first(error)}") from error
    except LocalTokenNotFoundError as error:
        raise UserError("publishing needs a token of the Hub; run `hf auth login`, or set HF_TOKEN") from error
    except (HfHubHTTPError, OSError) as error:
        raise UserError(f"cannot publish to {repo}: {_first(error)}; run the command again to continue") from error
    digests = record.files | {name: hashlib.sha256(data).hexdigest() for name, data in small.items()}
    for name in (*sent, CARD):
        if name not in there or not _arrived(there[name], digests[name], small.get(name, folder / name)):
            raise UserError(f"{repo} does not hold '{name}' as it was sent; run the command again")
    others = sorted(set(there) - set(sizes) - {".gitattributes"})
    return Published(sizes, text, record.proof, url, tuple(others))


def check_export(folder: Path) -> Exported:
    """The record of an export that may be published. Raises UserError for any other folder."""
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}")
    record = check(folder)
    if record.format not in FORMATS:
        raise UserError(f"{folder} is an export as '{record.format}', which this version does not know")
    if not (folder / CARD).exists():
        raise UserError(f"{folder} has no card: {CARD} is missing")
    # The name of the folder when it was written stands in the card; it may have been renamed since.
    written = (folder / CARD).read_text()
    name = next((line.removeprefix("# ") for line in written.splitlines() if line.startswith("# ")), folder.name)
    expected = card(name, folder, record, FORMATS[record.format].USE)
    for number, (there, made) in enumerate(_lines(written, expected), start=1):
        if there != made:
            raise UserError(
                f"the card of {folder} is not what its report.json and plan.json give: line {number} reads '{there}', not "
                f"'{made}'"
            )
    return record


def _lines(first: str, second: str) -> list[tuple[str, str]]:
    lines = [text.splitlines() for text in (first, second)]
    length = max(map(len, lines))
    padded = [each + [""] * (length - len(each)) for each in lines]
    return list(zip(*padded, strict=True))


def _arrived(file: RepoFile, sha256: str, content: bytes | Path) -> bool:
    """Whether the Hub's digest is that of what was sent: sha256 of large files, git's own of small ones."""
    if file.lfs is not None:
        return file.lfs.sha256 == sha256
    data = content if isinstance(content, bytes) else content.read_bytes()
    return file.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
