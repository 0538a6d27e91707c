"""Publishing: an export goes to the Hub as it was verified, in one commit; by default it is only shown what would go."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from surgery.errors import UserError
from surgery.exporting.card import render_card
from surgery.exporting.export import PLAN, RECORD, REPORT, Export, list_files
from surgery.exporting.patch import RECORD as PATCH
from surgery.records.plan import Plan
from surgery.records.report import Report
from surgery.runtime.files import write_text
from surgery.runtime.progress import say

CARD = "README.md"
# Of an earlier export in the same repository, which this one may not have.
WEIGHTS = ["model*.safetensors", "model*.safetensors.index.json", "pytorch_model*", "*.gguf", "patch.safetensors", "*.py"]
WEIGHTS += ["patch.json", "plan.json", "report.json"]


@dataclass(frozen=True)
class Published:
    """What was sent, or would be."""

    repo: str
    files: dict[str, int]
    """Name -> bytes."""
    card: str
    url: str | None
    """None for a dry run."""


def publish(
    folder: str | Path, repo: str, *, private: bool = False, dry_run: bool = True, overwrite: bool = False
) -> Published:
    """Send an export to the repository `repo` ("user/name") of the Hub, which is made if it is not there.

    dry_run: send nothing, and say what would go. overwrite: also where the repository holds a model that is no export of this
    toolkit. Raises UserError, before anything is sent, if the folder is not as it was verified, or the repository holds another
    model.
    """
    folder = Path(folder)
    record = check_folder(folder)
    try:
        validate_repo_id(repo)
        _, _ = repo.split("/")
    except ValueError as error:  # as HFValidationError is
        raise UserError(f"'{repo}' is no repository of the Hub; write user/name") from error
    made = _papers(folder, record, repo)
    sizes = {name: (folder / name).stat().st_size for name in record.files} | {
        name: len(t.encode()) for name, t in made.items()
    }
    if dry_run:
        return Published(repo, sizes, made[CARD], None)
    url = _send(folder, record, made, repo, private, overwrite)
    return Published(repo, sizes, made[CARD], url)


def check_folder(folder: Path) -> Export:
    """The record of an export whose files are those that were verified; what was added is not sent. Raises UserError, naming
    the first file that is not."""
    if not (folder / RECORD).is_file():
        raise UserError(f"{folder} holds no {RECORD}, so it was not verified; make it with `surgery export`")
    record, present = Export.read(folder / RECORD), list_files(folder)
    for name, digest in sorted(record.files.items()):
        if present.get(name) != digest:
            what = "was changed" if name in present else "is missing"
            raise UserError(f"{folder} is not as it was verified: '{name}' {what}")
    if added := sorted(present.keys() - record.files.keys()):
        say(f"not part of the export, and not sent: {', '.join(added[:3])}{', ...' * (len(added) > 3)}")
    return record


def _papers(folder: Path, record: Export, repo: str) -> dict[str, str]:
    """What is made for others, who do not see where the base lies on this machine: record, card, and a patch's record."""
    record = record.model_copy(update={"base": record.base.model_copy(update={"path": None})})
    plan = Plan.read(folder / PLAN) if (folder / PLAN).exists() else None
    report = Report.read(folder / REPORT) if (folder / REPORT).exists() else None
    made = {}
    if (folder / PATCH).exists():
        patch: dict[str, Any] = json.loads((folder / PATCH).read_text(encoding="utf-8"))
        made[PATCH] = json.dumps(patch | {"base": patch["base"] | {"path": None}}, indent=2) + "\n"
        digest = hashlib.sha256(made[PATCH].encode()).hexdigest()
        record = record.model_copy(update={"files": record.files | {PATCH: digest}})
    return made | {RECORD: record.text(), CARD: render_card(record, repo, plan, report)}


def _send(folder: Path, record: Export, made: dict[str, str], repo: str, private: bool, overwrite: bool) -> str:
    """Upload, in one commit that also removes what an earlier export left; return the repository's address."""
    api = HfApi()
    try:
        url = str(api.create_repo(repo, private=private, exist_ok=True))
        held = set(api.list_repo_files(repo))
        if not overwrite and RECORD not in held and any(name.endswith((".safetensors", ".bin", ".gguf")) for name in held):
            raise UserError(f"{repo} holds a model that is no export of this toolkit; choose another name, or --overwrite")
        with TemporaryDirectory() as place:
            for name in record.files:
                (Path(place) / name).parent.mkdir(parents=True, exist_ok=True)
                (Path(place) / name).symlink_to((folder / name).resolve())
            for name, text in made.items():
                write_text(Path(place) / name, text)
            message = f"Hybrid of {record.base.name}" if record.base.hub else "Hybrid"
            api.upload_folder(repo_id=repo, folder_path=place, commit_message=message, delete_patterns=WEIGHTS)
    except LocalTokenNotFoundError as error:
        raise UserError("publishing needs a token of the Hub; run `hf auth login`, or set HF_TOKEN") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot publish to {repo}: {first}; run the command again to continue") from error
    return url
