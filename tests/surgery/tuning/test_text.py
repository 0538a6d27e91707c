"""Text is the same from every kind of file, divided in two sides, and no network is asked."""

import json
import socket
from pathlib import Path

import pytest
import torch

from surgery.errors import UserError
from surgery.tuning.text import KEPT_BACK, check_apart, open_text, text_rows
from tests.surgery.tuning.small import TOKENIZER

WORDS = ["lamp", "drum", "boat", "ring", "chair", "mill", "inn", "church", "tower", "meadow"]
DOCUMENTS = [" ".join(WORDS[(i * k) % 10] for k in range(1, 30 + i)) + f" {i}." for i in range(60)]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something asked for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def write_all(folder: Path) -> dict[str, Path]:
    """The documents in each kind of file."""
    pa = pytest.importorskip("pyarrow")
    paths = {kind: folder / f"docs.{kind}" for kind in ("jsonl", "csv", "parquet")}
    paths["jsonl"].write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(DOCUMENTS)))
    paths["csv"].write_text("id,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(DOCUMENTS)))
    pa.parquet = __import__("pyarrow.parquet").parquet
    pa.parquet.write_table(pa.table({"text": DOCUMENTS}), paths["parquet"])
    return paths


@pytest.mark.usefixtures("no_network")
def test_every_kind_of_file_gives_the_same_text(tmp_path: Path) -> None:
    sources = [open_text([str(path)])[0] for path in write_all(tmp_path).values()]
    assert len({source.digest for source in sources}) == 1
    assert list(sources[0].documents) == DOCUMENTS
    rows = [text_rows([source], TOKENIZER, 50, range(3), seed=1)[0] for source in sources]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_a_folder_is_its_files_but_not_its_readme(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.txt").write_text("one two " * 99)
    (tmp_path / "inner" / "b.md").write_text("three four " * 99)
    (tmp_path / "README.md").write_text("about")
    (source,) = open_text([str(tmp_path)])
    assert [text[:5] for text in source.documents] == ["one t", "three"]
    (tmp_path / "c.csv").write_text("text\nfive\n")
    with pytest.raises(UserError):
        open_text([str(tmp_path)])


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_the_two_sides_have_nothing_in_common(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"docs.{kind}"
    lines = [json.dumps({"text": text}) for text in DOCUMENTS]
    path.write_text("\n".join(lines if kind == "jsonl" else DOCUMENTS))
    (source,) = open_text([str(path)])
    train, kept = source.sides[False], source.sides[True]
    if kind == "txt":
        assert train[0] + kept[0] == path.read_text()
        assert len(kept[0]) == len(path.read_text()) // KEPT_BACK
    else:
        assert kept
        assert sorted(train + kept) == sorted(DOCUMENTS)
        assert not {*train} & {*kept}


def test_a_row_depends_on_its_number_alone(tmp_path: Path) -> None:
    sources = open_text(["toy", str(write_all(tmp_path)["jsonl"])])
    whole, positions = text_rows(sources, TOKENIZER, 64, range(6), seed=5)
    part, own = text_rows(sources, TOKENIZER, 64, [4, 2], seed=5)
    assert torch.equal(part, whole[[4, 2]])
    assert positions is not None
    assert own is None or torch.equal(own, positions[[4, 2]])
    assert not torch.equal(whole, text_rows(sources, TOKENIZER, 64, range(6), seed=6)[0])
    assert not torch.equal(whole, text_rows(sources, TOKENIZER, 64, range(6), seed=5, kept_back=True)[0])


def test_positions_begin_again_with_every_document(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": f"Every lamp of Barin {i}."}) + "\n" for i in range(200)))
    ids, positions = text_rows(open_text([str(path)]), TOKENIZER, 40, range(4), seed=0)
    assert ids.shape == (4, 40)
    assert positions is not None
    begins = positions == 0
    assert begins[:, 0].all()
    assert {TOKENIZER.decode([token]) for token in ids[begins].tolist()} == {"Every"}
    assert (positions[:, 1:][~begins[:, 1:]] == positions[:, :-1][~begins[:, 1:]] + 1).all()


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.txt", None, "a.txt"),
        ("a.txt", " \n", "no text"),
        ("a.jsonl", "{", "line 1"),
        ("a.jsonl", '{"body": "x"}', "text"),
        ("a.jsonl", '{"text": 3}', "text"),
        ("a.jsonl", "[1]", "line 1"),
        ("a.csv", "body\nx\n", "text"),
        ("a.parquet", "no parquet", "a.parquet"),
        ("words", None, "words"),
    ],
)
def test_what_holds_no_text_is_named(tmp_path: Path, name: str, content: str | None, found: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=found):
        open_text([str(tmp_path / name) if name != "words" else name])


def test_documents_that_fill_no_row_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": letter}) + "\n" for letter in "ABCD"))
    with pytest.raises(UserError, match="fill a row"):
        text_rows(open_text([str(path)]), TOKENIZER, 40, range(1), seed=0)


def test_overlap_is_found_however_it_is_written(tmp_path: Path) -> None:
    text = " ".join(DOCUMENTS[:40])
    other = " ".join(DOCUMENTS[50:])
    path = tmp_path / "train.txt"
    path.write_text(other + "\n" + "\n".join(text.upper().split(" ")) + other)
    sources = open_text([str(path)])
    with pytest.raises(UserError, match=r"train\.txt"):
        check_apart(text, sources)
    check_apart("In no file is there anything of what is written in these lines, which are long enough. " * 4, sources)
    check_apart("short", sources)
