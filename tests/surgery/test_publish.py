"""Publishing: only what was verified, with the card that its report gives, in one commit, compared with what arrived. The Hub
is fake."""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import CommitOperationDelete
from huggingface_hub.hf_api import RepoFile

from surgery.commands import publish
from surgery.errors import UserError
from surgery.evaluation.report import Report
from surgery.exporting.export import export
from surgery.exporting.folder import CARD, RECORD, Exported, check, digests
from surgery.loading.digests import conditions, model_digest
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.runtime.ownership.folder import RECORD as OWN
from surgery.splicing.load import load
from surgery.splicing.splice import splice
from surgery.world.tokenizer import build_tokenizer
from tests.models import ROOT, VOCABULARY, names, random_base

REPO = "someone/hybrid"


class Hub:
    """What HfApi does for publish, in memory: files over 10 kB have the digest of large ones, and are kept once they arrived,
    whether a commit follows or not. Every state of the repository stays readable by its commit."""

    def __init__(self):
        self.commits, self.private, self.fails, self.loses = [{}], None, None, set()
        self.blobs, self.sent, self.meanwhile = {}, [], None

    @property
    def files(self):
        return self.commits[-1]

    def create_repo(self, repo, *, private, exist_ok):
        assert exist_ok
        self.private = private
        return f"https://hub/{repo}"

    def repo_info(self, repo):
        return SimpleNamespace(sha=f"{len(self.commits) - 1:040x}")

    def hf_hub_download(self, repo, name, *, revision):
        held = Path(tempfile.mkdtemp(), name)
        held.write_bytes(self.commits[int(revision, 16)][name])
        return str(held)

    def create_commit(self, repo, operations, *, commit_message, parent_commit):
        if self.meanwhile is not None:
            self.commits.append(self.files | self.meanwhile)
        changed = dict(self.files)
        for operation in operations:
            if isinstance(operation, CommitOperationDelete):
                del changed[operation.path_in_repo]
                continue
            name = operation.path_in_repo
            if name == self.fails:
                raise OSError("the line is dead")
            with operation.as_file() as file:
                data = file.read()
            if len(data) > 10_000 and self.blobs.setdefault(hashlib.sha256(data).hexdigest(), data) is data:
                self.sent.append(name)
            changed[name] = data
        if parent_commit != self.repo_info(repo).sha:
            raise OSError("412: the repository has changed")
        self.commits.append(changed)
        if self.meanwhile is None:
            self.commits.append(changed | {"later.txt": b"someone else's, a moment later"})
        return SimpleNamespace(oid=f"{len(self.commits) - 2:040x}")

    def list_repo_tree(self, repo, *, recursive, revision):
        assert recursive
        for name, sent in self.commits[int(revision, 16)].items():
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
    base = random_base(vocab_size=VOCABULARY)
    (place / "base").mkdir()
    (place / "base" / CARD).write_text("---\nlicense: other\nlicense_name: toy\nlicense_link: LICENSE\n---\n# base\n")
    plan = Plan(sites=("L1.H3",))
    hybrid = splice(base, plan)
    report = demo_report(hybrid, tokenizer)
    export(
        hybrid, place / "hybrid", tokenizer=tokenizer, plan=plan, base=str(place / "base"), report=report,
        recipe=Recipe(model="x"),
    )  # fmt: skip
    return place / "hybrid"


def _tuned() -> str:
    """The tuned hybrid's accuracy at 64 pairs, as a card prints it."""
    return f"{Report.read(ROOT / 'recipes' / 'demo-mamba2.report.json', unsealed='take').models['tuned'].kv['64'].accuracy:.3f}"


def demo_report(model, tokenizer):
    """The demo's report, as if it were about this model."""
    report = Report.read(ROOT / "recipes" / "demo-mamba2.report.json", unsealed="take")
    about = report.models["tuned"].model_copy(update={"conditions": conditions(model, tokenizer)})
    others = {name: each.model_copy(update={"conditions": None}) for name, each in report.models.items()}
    return report.model_copy(update={"models": others | {"tuned": about}})


@pytest.fixture
def folder(exported, tmp_path):
    shutil.copytree(exported, tmp_path / "hybrid")
    return tmp_path / "hybrid"


def test_everything_arrives_with_its_card(hub, folder):
    hub.files["LICENSE"] = b"terms"
    done = publish.publish(folder, REPO, private=True)
    assert hub.private is True
    assert done.others == ("LICENSE",)  # at the commit: what came later is not looked at
    arrived = hub.commits[int(done.commit, 16)]
    assert done.files == {name: len(data) for name, data in arrived.items() if name != "LICENSE"}
    assert {"model.safetensors", "report.json", "recipe.yaml", "plan.json", "retrieval.png", "sites.png", RECORD} <= set(
        arrived
    )
    assert all(arrived[path.name] == path.read_bytes() for path in folder.iterdir() if path.name not in (CARD, RECORD, OWN))
    card = arrived[CARD].decode()
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
    assert "The weights of this export are the row **tuned**, measured in float32." in card
    assert "control_tuned" in report.models
    assert "a gain counts only as far as it exceeds theirs" in card
    assert str(folder.parent) not in card


def test_the_command_prints_what_would_go_and_sends_nothing(hub, folder, surgery):
    status, out, err = surgery("publish", folder, REPO, "--dry-run")
    assert status == 0, err
    assert hub.files == {}
    for path in (folder / name for name in names(folder)):
        assert path.name in out
    assert "| control_tuned |" in out
    assert "Nothing was sent" in out
    status, out, err = surgery("publish", folder, REPO)
    assert status == 0, err
    assert "read back in a fresh process by transformers" in out
    assert "Sent and compared: https://hub/someone/hybrid" in out
    assert set(hub.files) == {*names(folder)} | {"later.txt"}


def test_an_interrupted_upload_goes_on_and_shows_nothing_before(hub, folder):
    hub.fails = "tokenizer.json"
    with pytest.raises(UserError, match="cannot publish to someone/hybrid: the line is dead; run the command again"):
        publish.publish(folder, REPO)
    assert hub.files == {}  # one commit or none
    there = list(hub.sent)
    assert "model.safetensors" in there
    hub.fails = None
    publish.publish(folder, REPO)
    assert len(hub.sent) == len({*hub.sent})  # what had arrived is not sent again
    assert {*there} < {*hub.sent}


def test_a_later_export_leaves_nothing_of_the_earlier_one_in_force(hub, folder, tmp_path):
    """One file of weights first, shards later; the repository also holds a pickle, and what a user put there."""
    publish.publish(folder, REPO)
    foreign = {"pytorch_model.bin": b"old", "adapter_config.json": b"{}", "docs/model.safetensors": b"x", "face.png": b"png"}
    hub.commits.append(hub.files | foreign)
    (tmp_path / "base").mkdir()
    tokenizer, plan = build_tokenizer(), Plan(sites=("L1.H2",))
    other = splice(random_base(vocab_size=VOCABULARY), plan)
    export(other, tmp_path / "again", tokenizer=tokenizer, plan=plan, base=str(tmp_path / "base"), max_shard_size="100KB")
    done = publish.publish(tmp_path / "again", REPO)
    arrived = hub.commits[int(done.commit, 16)]
    shards = {path.name for path in (tmp_path / "again").glob("model-*.safetensors")}
    assert len(shards) > 3
    assert {name for name in arrived if "/" not in name and name.endswith((".safetensors", ".bin"))} == shards
    # A report of the earlier weights goes with them.
    assert done.deleted == (
        "adapter_config.json", "model.safetensors", "pytorch_model.bin", "recipe.yaml", "report.json", "retrieval.png"
    )  # fmt: skip
    assert done.others == ("docs/model.safetensors", "face.png", "later.txt")


def test_what_is_published_names_the_base_and_not_its_place(hub, folder, tmp_path):
    """A patch: its record says which base it belongs to, and the export's record says what the patch's is."""
    tokenizer, plan = build_tokenizer(), Plan(sites=("L1.H3",))
    base = random_base(vocab_size=VOCABULARY)
    base.save_pretrained(tmp_path / "alice" / "toy")
    tokenizer.save_pretrained(tmp_path / "alice" / "toy")
    place = str(tmp_path / "alice" / "toy")
    export(splice(base, plan), tmp_path / "patch", format="patch", tokenizer=tokenizer, plan=plan, base=place)
    for path in (tmp_path / "patch").iterdir():
        assert path.name == OWN or b"alice" not in path.read_bytes(), path.name
    assert model_digest(load(tmp_path / "patch").model) == check(tmp_path / "patch").digest  # it is found all the same
    done = publish.publish(tmp_path / "patch", REPO)
    arrived = hub.commits[int(done.commit, 16)]
    (tmp_path / "got").mkdir()
    for name, data in arrived.items():
        assert b"alice" not in data, name
        (tmp_path / "got" / name).write_bytes(data)
    assert check(tmp_path / "got").base.name == "toy"
    with pytest.raises(UserError, match=r"is a patch on .*toy, which is not here"):
        load(tmp_path / "got")
    joined = load(tmp_path / "got", base=place)
    assert model_digest(joined.model) == check(tmp_path / "got").digest


def test_the_model_of_someone_else_is_not_replaced_unasked(hub, folder, surgery):
    theirs = {"README.md": b"mine", "config.json": b"{}", "pytorch_model.bin": b"years of work", "notes.txt": b"n"}
    for record in ({}, {RECORD: b'{"files": {}}'}):
        hub.commits.append(theirs | record)
        before = len(hub.commits)
        status, out, err = surgery("publish", folder, REPO)
        assert (status, out) == (2, "")
        assert err == (
            "surgery: someone/hybrid holds a model that is no export of this toolkit ('config.json'); choose another name, or "
            "replace it with --overwrite\n"
        )
        assert len(hub.commits) == before
    status, out, err = surgery("publish", folder, REPO, "--overwrite")
    assert status == 0, err
    assert "Deleted there, from an earlier export: pytorch_model.bin." in out
    assert "pytorch_model.bin" not in hub.files
    assert hub.files["notes.txt"] == b"n"


def test_a_repository_that_changes_meanwhile_is_left_alone(hub, folder):
    hub.meanwhile = {"model.safetensors": b"another"}
    with pytest.raises(UserError, match="412: the repository has changed; run the command again"):
        publish.publish(folder, REPO)
    assert hub.files == hub.meanwhile


@pytest.mark.parametrize("name", ["model.safetensors", "plan.json", CARD])
def test_what_arrived_wrong_is_named(hub, folder, name):
    hub.loses = {name}
    with pytest.raises(UserError, match=f"someone/hybrid does not hold '{name}' as it was sent"):
        publish.publish(folder, REPO)


def test_what_stays_of_an_earlier_export_is_named(hub, folder, monkeypatch):
    """A Hub that took the commit and not its deletions: from_pretrained may still load the old weights."""
    hub.commits.append({**hub.files, "config.json": b"{}", "pytorch_model.bin": b"old"})
    commit = hub.create_commit

    def kept(repo, operations, **named):
        return commit(repo, [each for each in operations if not isinstance(each, CommitOperationDelete)], **named)

    monkeypatch.setattr(hub, "create_commit", kept)
    with pytest.raises(UserError, match=r"someone/hybrid still holds 'pytorch_model\.bin' of an earlier export"):
        publish.publish(folder, REPO, overwrite=True)


def _edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def _stale(folder):
    """Another report, sealed, and a record that knows of it: only the card is still that of the old one."""
    content = json.loads((folder / "report.json").read_text())
    content["models"]["tuned"]["kv"]["4"]["accuracy"] = 0.123
    Report.model_validate(content).write(folder / "report.json")
    _forge(folder, files=digests(folder))


def _forge(folder, **fields):
    """Other fields in the record, with a seal that fits."""
    Exported.model_validate(json.loads((folder / RECORD).read_text()) | fields).write(folder / RECORD)


def _proof(folder, **fields):
    return Exported.read(folder / RECORD).proof.model_copy(update=fields).model_dump()


def _unseal(path):
    content = json.loads(path.read_text())
    del content["seal"]
    path.write_text(json.dumps(content))


def _unsealed(folder):
    """A report as 0.5.1 wrote it, with a record that knows of it."""
    _unseal(folder / "report.json")
    _forge(folder, files=digests(folder))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda f: (f / RECORD).unlink(), "was not verified: it holds no export.json"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x"), "not as it was verified: 'model.safetensors' was changed"),
        (lambda f: (f / "model.safetensors").unlink(), "not as it was verified: 'model.safetensors' is missing"),
        (lambda f: (f / "notes.txt").write_text("x"), "not as it was verified: 'notes.txt' was added"),
        (lambda f: _forge(f, proof=_proof(f, tolerance=-1)), "was not verified: its logits differ by"),
        (lambda f: _forge(f, format="new"), "which this version does not know"),
        (lambda f: _edit(f / RECORD, '"tolerance": 0.', '"tolerance": 1.'), "export.json is not as it was written"),
        (lambda f: _unseal(f / RECORD), "export.json has no seal: it was edited"),
        (lambda f: _forge(f, digest="0" * 64), "report.json did not measure the weights that export.json names"),
        (_unsealed, "report.json has no seal: it was edited"),
        (lambda f: _edit(f / CARD, _tuned(), "0.999"), "the card of .* is not what its report.json and plan.json give: line"),
        (lambda f: _edit(f / CARD, "# hybrid", "# The best model"), "the card of"),
        (_stale, "the card of .* is not what its report.json and plan.json give: line"),
        (lambda f: (f / CARD).unlink(), "has no card"),
        (shutil.rmtree, "no such folder"),
    ],
    ids=range(15),
)
def test_only_what_was_verified_is_published(hub, folder, surgery, change, complaint):
    change(folder)
    with pytest.raises(UserError, match=complaint):
        publish.publish(folder, REPO)
    status, out, err = surgery("publish", folder, REPO)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert hub.files == {}


@pytest.mark.parametrize("repo", ["hybrid", "a/b/c", "a/--x"])
def test_a_repository_that_is_none_is_refused(hub, folder, repo):
    with pytest.raises(UserError, match="is not a repository of the Hub"):
        publish.publish(folder, repo, dry_run=True)
