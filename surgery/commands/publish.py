"""Publishing: an export goes to the Hub as it was verified, with a card that says what its report says, and is compared there
with what was sent.

All of it is one commit: who loads the repository sees the old export or the new one. What the old one had and the new one has
not goes in the same commit, weights above all: from_pretrained takes one large file before it looks for shards. What a user put
there (a licence, pictures, a conversion for another program) stays.
"""

import fnmatch
import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from surgery.errors import UserError
from surgery.exporting.card import card
from surgery.exporting.folder import CARD, RECORD, Exported, check
from surgery.exporting.formats import format_of, names
from surgery.exporting.verify import Proof
from surgery.loading.digests import file_digest
from surgery.records.plan import PATCH
from surgery.splicing.joining import Patch

# Files at the top of a repository that decide what is loaded from it, whoever wrote them: weights, adapters, configuration and
# tokenizer, as transformers looks for them.
LOADED = """
    model*.safetensors model*.safetensors.index.json pytorch_model*.bin pytorch_model*.bin.index.json patch.safetensors
    patch.json adapter_model.* adapter_config.json tf_model*.h5 flax_model*.msgpack config.json generation_config.json
    tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json vocab.json vocab.txt
    merges.txt spiece.model chat_template.json chat_template.jinja
""".split()


@dataclass(frozen=True)
class Published:
    """files: size in bytes of all that was sent, or would be, by name. card: the README.md that goes with it. proof: how it
    was verified when it was written. url: None for a dry run. commit: the Hub's id. deleted: what an earlier export had left
    there. others: what the repository holds besides."""

    files: dict[str, int]
    card: str
    proof: Proof
    url: str | None = None
    commit: str | None = None
    deleted: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def publish(
    folder: str | Path, repo: str, *, private: bool = False, dry_run: bool = False, overwrite: bool = False
) -> Published:
    """Send an export to the repository `repo` ("user/name") of the Hub, which is made if it is not there.

    An upload that was interrupted goes on where it stopped when it is called again: the Hub keeps the large files that it has,
    and shows none of them before the commit. overwrite: also where the repository holds a model that is no export of this
    toolkit, which is then gone. Raises UserError, before anything is sent, if the folder is not as it was verified, or its card
    is not what its report gives, or the repository holds another model; and afterwards if the Hub holds other bytes than this
    folder.
    """
    folder = Path(folder)
    record = check_export(folder)
    try:
        validate_repo_id(repo)
        if repo.count("/") != 1:
            raise UserError(f"'{repo}' is not a repository of the Hub; write user/name")
        contents = _contents(folder, record, repo)
        sizes = {name: _size(content) for name, content in contents.items()}
        text = contents[CARD].decode()  # type: ignore[union-attr]
        if dry_run:
            return Published(sizes, text, record.proof)
        api = HfApi()
        url = str(api.create_repo(repo, private=private, exist_ok=True))
        parent = api.repo_info(repo).sha
        held = _files(api, repo, parent)
        stale = _stale(api, repo, parent, held, overwrite) - set(contents)
        additions = [CommitOperationAdd(name, content) for name, content in contents.items()]
        done = api.create_commit(
            repo,
            [*additions, *(CommitOperationDelete(name) for name in sorted(stale))],
            commit_message=f"Hybrid of {record.base.name}" if record.base.hub else "Hybrid",
            parent_commit=parent,
        )
        held = _files(api, repo, done.oid)
    except HFValidationError as error:
        raise UserError(f"'{repo}' is not a repository of the Hub: {_first(error)}") from error
    except LocalTokenNotFoundError as error:
        raise UserError("publishing needs a token of the Hub; run `hf auth login`, or set HF_TOKEN") from error
    except (HfHubHTTPError, OSError, ValueError) as error:  # ValueError: the Hub refuses the card's licence, say
        raise UserError(f"cannot publish to {repo}: {_first(error)}; run the command again to continue") from error
    for name, content in contents.items():
        if name not in held or not _arrived(held[name], content):
            raise UserError(f"{repo} does not hold '{name}' as it was sent (commit {done.oid}); run the command again")
    if left := sorted(stale & set(held)):
        raise UserError(f"{repo} still holds '{left[0]}' of an earlier export (commit {done.oid}); run the command again")
    others = sorted(set(held) - set(contents) - {".gitattributes"})
    return Published(sizes, text, record.proof, url, done.oid, tuple(sorted(stale)), tuple(others))


def _contents(folder: Path, record: Exported, repo: str) -> dict[str, bytes | Path]:
    """What is sent, by name: files of the folder as they are, and those that are made for others, who do not see where the base
    lies on this machine."""
    contents: dict[str, bytes | Path] = {name: folder / name for name in record.files}
    digests = dict(record.files)
    if PATCH in contents:
        patch = Patch.read(folder / PATCH)
        for_others = patch.model_copy(update={"base": patch.base.published(folder)}).text().encode()
        contents[PATCH], digests[PATCH] = for_others, hashlib.sha256(for_others).hexdigest()
    sent = record.model_copy(update={"base": record.base.published(folder), "files": digests})
    made_card = card(repo, folder, sent, format_of(record.format).USE)
    return contents | {RECORD: sent.text().encode(), CARD: made_card.encode()}


def _files(api: HfApi, repo: str, revision: str | None) -> dict[str, RepoFile]:
    """What a repository holds at a commit, by name."""
    tree = api.list_repo_tree(repo, recursive=True, revision=revision)
    return {file.path: file for file in tree if isinstance(file, RepoFile)}


def _stale(api: HfApi, repo: str, revision: str | None, held: Iterable[str], overwrite: bool) -> set[str]:
    """What of a repository another export replaces: the files of the export that is there, and whatever would be loaded. Raises
    UserError if what is there is another model and is not to be overwritten."""
    stale = {name for name in held if any(fnmatch.fnmatchcase(name, pattern) for pattern in LOADED)}
    earlier = _earlier(api, repo, revision) if RECORD in held else None
    if earlier is None and stale and not overwrite:
        raise UserError(
            f"{repo} holds a model that is no export of this toolkit ('{min(stale)}'); choose another name, or replace it "
            "with --overwrite"
        )
    return stale | ({*(earlier or ()), RECORD} & {*held})


def _earlier(api: HfApi, repo: str, revision: str | None) -> set[str] | None:
    """The names in the export.json of a repository; None if that is not one of ours."""
    try:
        held = json.loads(Path(api.hf_hub_download(repo, RECORD, revision=revision)).read_text(encoding="utf-8"))
        return {*held["files"]} if {"toolkit", "format", "proof"} <= {*held} else None
    except (ValueError, KeyError, TypeError):
        return None


def check_export(folder: Path) -> Exported:
    """The record of an export that may be published. Raises UserError for any other folder."""
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}")
    record = check(folder)
    if record.format not in names():
        raise UserError(f"{folder} is an export as '{record.format}', which this version does not know")
    if not (folder / CARD).exists():
        raise UserError(f"{folder} has no card: {CARD} is missing")
    # The name of the folder when it was written is in the card; it may have been renamed since.
    written = (folder / CARD).read_text()
    use = format_of(record.format).USE
    expected = card(_loaded_by(written, use) or folder.name, folder, record, use)
    pairs = zip_longest(written.splitlines(), expected.splitlines(), fillvalue="")
    for number, (held, generated) in enumerate(pairs, start=1):
        if held != generated:
            raise UserError(
                f"the card of {folder} is not what its report.json and plan.json give: line {number} reads '{held}', not "
                f"'{generated}'"
            )
    return record


def _loaded_by(text: str, use: str) -> str:
    """The name by which a card's code loads its folder: that in the title is escaped, and in one line. Empty where it has
    none. use: the code with NAME for the name."""
    before, after = use.split("NAME")[:2]
    if before not in text:
        return ""
    with suppress(ValueError):
        name, _ = json.JSONDecoder().raw_decode(text, text.index(before) + len(before) - 1)  # from the quotation mark on
        return str(name).removesuffix(after.partition('"')[0])
    return ""


def _size(content: bytes | Path) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _arrived(file: RepoFile, content: bytes | Path) -> bool:
    """Whether the Hub's digest is that of what was sent: sha256 of large files, git's own of small ones."""
    if file.lfs is not None:
        sha256 = hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else file_digest(content)
        return file.lfs.sha256 == sha256
    data = content if isinstance(content, bytes) else content.read_bytes()
    return file.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
