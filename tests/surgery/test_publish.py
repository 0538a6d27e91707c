"""Publishing: only what was verified, with the card that its report gives, compared with what arrived. The Hub is fake."""

import hashlib
import json
import shutil

import pytest
from huggingface_hub.hf_api import RepoFile

from surgery.bench import Report
from surgery.errors import UserError
from surgery.export import export, publish
from surgery.export.folder import CARD, RECORD, digests
from surgery.plan import Plan
from surgery.recipe import Recipe
from surgery.splice import splice
from surgery.world.tokenizer import build_tokenizer
from tests.conftest import ROOT, random_base

REPO = "someone/hybrid"


class Hub:
    """What HfApi does for publish, in memory: files over 10 kB have the digest of large ones."""

    def __init__(self):
        self.files, self.private, self.fails, self.loses = {}, None, None, set()

    def create_repo(self, repo, *, private, exist_ok):
        assert exist_ok
        self.private = private
        return f"https://hub/{repo}"

    def upload_folder(self, *, repo_id, folder_path, allow_patterns, commit_message):
        for name in sorted(allow_patterns):
            if name == self.fails:
                raise OSError("the line is dead")
            self.files.setdefault(name, (folder_path / name).read_bytes())

    def upload_file(self, *, repo_id, path_or_fileobj, path_in_repo, commit_message):
        self.files[path_in_repo] = path_or_fileobj

    def list_repo_tree(self, repo, *, recursive):
        assert recursive
        for name, sent in self.files.items():
            data = sent[:-1] if name in self.loses else sent
            sha256 = hashlib.sha256(data).hexdigest()
            large = {"size": len(data), "oid": sha256, "pointerSize": 1} if len(data) > 10_000 else None
            oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            yield RepoFile(path=name, size=len(data), oid=oid if large is None else "0" * 40, lfs=large)


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(publish, "HfApi", lambda: hub)
    return hub


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A hybrid with recipe and report. The report is the demo's."""
    place = tmp_path_factory.mktemp("publish")
    tokenizer = build_tokenizer()
    base = random_base(vocab_size=-(-len(tokenizer) // 16) * 16)
    (place / "base").mkdir()
    (place / "base" / CARD).write_text("---\nlicense: other\nlicense_name: toy\nlicense_link: LICENSE\n---\n# base\n")
    plan, report = Plan(sites=("L1.H3",)), Report.read(ROOT / "recipes" / "demo.report.json")
    export(
        splice(base, plan), place / "hybrid", tokenizer=tokenizer, plan=plan, base=str(place / "base"), report=report,
        recipe=Recipe(model="x"),
    )  # fmt: skip
    return place / "hybrid"


@pytest.fixture
def folder(exported, tmp_path):
    shutil.copytree(exported, tmp_path / "hybrid")
    return tmp_path / "hybrid"


def test_everything_arrives_with_its_card(hub, folder):
    hub.files["LICENSE"] = b"terms"
    done = publish.publish(folder, REPO, private=True)
    assert hub.private is True
    assert done.others == ("LICENSE",)
    assert done.files == {name: len(data) for name, data in hub.files.items() if name != "LICENSE"}
    assert {"model.safetensors", "report.json", "recipe.yaml", "plan.json", "retrieval.png", "sites.png", RECORD} <= set(
        hub.files
    )
    assert all(hub.files[path.name] == path.read_bytes() for path in folder.iterdir() if path.name != CARD)
    card = hub.files[CARD].decode()
    assert f'from_pretrained("{REPO}", trust_remote_code=True)' in card
    for line in ("license: other", "license_name: toy", "license_link: LICENSE", "library_name: transformers",
                 "pipeline_tag: text-generation", "- mamba2"):  # fmt: skip
        assert f"\n{line}\n" in card
    report = Report.read(folder / "report.json")
    for name, model in report.models.items():
        assert f"| {name} | {model.kv['4'].accuracy:.3f} |" in card
        if model.change:
            change = model.change["kv.64"]
            assert f"{change.value:+.3f} [{change.ci95[0]:+.3f}, {change.ci95[1]:+.3f}]" in card
    assert "control_tuned" in report.models
    assert "a gain counts only as far as it exceeds theirs" in card
    assert str(folder.parent) not in card


def test_the_command_prints_what_would_go_and_sends_nothing(hub, folder, surgery):
    status, out, err = surgery("publish", folder, REPO, "--dry-run")
    assert status == 0, err
    assert hub.files == {}
    for path in folder.iterdir():
        assert path.name in out
    assert "| control_tuned |" in out
    assert "Nothing was sent" in out
    status, out, err = surgery("publish", folder, REPO)
    assert status == 0, err
    assert "read back in a fresh process by transformers" in out
    assert "Sent and compared: https://hub/someone/hybrid" in out
    assert set(hub.files) == {path.name for path in folder.iterdir()}


def test_an_interrupted_upload_goes_on(hub, folder):
    hub.fails = "plan.json"
    with pytest.raises(UserError, match="cannot publish to someone/hybrid: the line is dead; run the command again"):
        publish.publish(folder, REPO)
    assert CARD not in hub.files  # the card goes last
    there = dict(hub.files)
    assert there
    hub.fails = None
    publish.publish(folder, REPO)
    assert all(hub.files[name] is data for name, data in there.items())


@pytest.mark.parametrize("name", ["model.safetensors", "plan.json", CARD])
def test_what_arrived_wrong_is_named(hub, folder, name):
    hub.loses = {name}
    with pytest.raises(UserError, match=f"someone/hybrid does not hold '{name}' as it was sent"):
        publish.publish(folder, REPO)


def _edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def _stale(folder):
    """Another report, and a record that knows of it: only the card is still that of the old one."""
    _edit(folder / "report.json", '"accuracy": 0.9', '"accuracy": 0.8')
    record = json.loads((folder / RECORD).read_text()) | {"files": digests(folder)}
    (folder / RECORD).write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda f: (f / RECORD).unlink(), "was not verified: it holds no export.json"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x"), "not as it was verified: 'model.safetensors' was changed"),
        (lambda f: (f / "model.safetensors").unlink(), "not as it was verified: 'model.safetensors' is missing"),
        (lambda f: (f / "notes.txt").write_text("x"), "not as it was verified: 'notes.txt' was added"),
        (lambda f: _edit(f / RECORD, '"tolerance": 0.0001', '"tolerance": -1'), "was not verified: its logits differ by"),
        (lambda f: _edit(f / RECORD, '"format": "hf"', '"format": "new"'), "which this version does not know"),
        (lambda f: _edit(f / CARD, "0.944", "0.999"), "the card of .* is not what its report.json and plan.json give: line"),
        (lambda f: _edit(f / CARD, "# hybrid", "# The best model"), "the card of"),
        (_stale, "the card of .* is not what its report.json and plan.json give: line"),
        (lambda f: (f / CARD).unlink(), "has no card"),
        (shutil.rmtree, "no such folder"),
    ],
    ids=range(11),
)
def test_only_what_was_verified_is_published(hub, folder, surgery, change, complaint):
    change(folder)
    with pytest.raises(UserError, match=complaint):
        publish.publish(folder, REPO)
    status, out, err = surgery("publish", folder, REPO)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert hub.files == {}


@pytest.mark.parametrize("repo", ["hybrid", "a/b/c", "some one/x", "a/--x"])
def test_a_repository_that_is_none_is_refused(hub, folder, repo):
    with pytest.raises(UserError, match="is not a repository of the Hub"):
        publish.publish(folder, repo, dry_run=True)
