"""Publishing with a stand-in for the Hub: what is sent is what was verified, and other people's models stay."""

from hashlib import sha256
from pathlib import Path

import pytest

from surgery.errors import UserError
from surgery.exporting import export as exporting
from surgery.exporting import publish as module
from surgery.exporting.export import Export, export
from surgery.exporting.publish import publish
from tests.surgery.exporting.folders import PLAN, InProcess, hybrid_of, write_base


class Hub:
    """Remembers what is uploaded. held: names of files that the repository has already."""

    def __init__(self, held=()):
        self.held, self.sent = list(held), {}

    def create_repo(self, repo, private, exist_ok):
        return f"https://hub/{repo}"

    def list_repo_files(self, repo):
        return self.held

    def upload_folder(self, repo_id, folder_path, commit_message, delete_patterns):
        files = [path for path in Path(folder_path).rglob("*") if path.is_file()]
        self.sent = {path.relative_to(folder_path).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module", params=["hf", "patch"])
def exported(request, tmp_path_factory):
    place = tmp_path_factory.mktemp("place")
    base = write_base(place / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "start_reader", lambda _: InProcess())
        export(*hybrid_of(base), place / "out", plan=PLAN, base=base, format=request.param)
    return place / "out"


def send(exported, monkeypatch, hub, **options):
    monkeypatch.setattr(module, "HfApi", lambda: hub)
    return publish(exported, "me/hybrid", dry_run=False, **options)


def test_what_is_sent_is_what_was_shown(exported, monkeypatch):
    hub, shown = Hub(), publish(exported, "me/hybrid")
    done = send(exported, monkeypatch, hub)
    assert done.url == "https://hub/me/hybrid"
    assert {name: len(content) for name, content in hub.sent.items()} == shown.files
    assert hub.sent["README.md"].decode() == shown.card
    record = Export.model_validate_json(hub.sent["export.json"])
    assert {name: sha256(hub.sent[name]).hexdigest() for name in record.files} == record.files


def test_nothing_that_is_sent_names_a_place_on_this_machine(exported, monkeypatch):
    hub = Hub()
    send(exported, monkeypatch, hub)
    assert [name for name, content in hub.sent.items() if str(exported.parent).encode() in content] == []
    assert [name for name, content in hub.sent.items() if b'"../base"' in content] == []


def test_another_model_is_replaced_only_when_asked(exported, monkeypatch):
    with pytest.raises(UserError, match="overwrite"):
        send(exported, monkeypatch, Hub(["model.safetensors"]))
    hub = Hub(["model.safetensors"])
    send(exported, monkeypatch, hub, overwrite=True)
    assert hub.sent
    earlier = Hub(["model.safetensors", "export.json"])
    send(exported, monkeypatch, earlier)
    assert earlier.sent


@pytest.mark.parametrize("repo", ["hybrid", "me/my/hybrid", "me/..", ""])
def test_a_name_that_is_no_repository(exported, repo):
    with pytest.raises(UserError):
        publish(exported, repo)
