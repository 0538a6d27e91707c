"""Wrong inputs of every kind: one line that says what is wrong, at once, and nothing written. tests/campaign/fuzz.py looks for
more."""

import json
import os
import random
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from surgery.errors import UserError
from surgery.models.finite import broken_weight
from surgery.probes import make
from surgery.probes.knowledge import Knowledge
from surgery.records import reading
from surgery.records.plan import Plan
from surgery.records.reading import check_name, parse_json, read_content
from surgery.records.recipe import Text, read_recipe
from surgery.records.record import read_text
from surgery.records.yaml_text import parse_yaml
from surgery.tuning.draws import Draws
from surgery.tuning.text_sources import Reading, open_source
from tests.models import TINY


def line_of(call) -> str:
    """What a refusal says: one line, not too long for a terminal."""
    with pytest.raises(UserError) as refused:
        call()
    text = str(refused.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


@pytest.fixture
def odd_files(tmp_path):
    """Files that are none, or without an end."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "endless").symlink_to("/dev/zero")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**42)  # takes no space
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("folder", "is a folder"), ("pipe", "no plain file"), ("loop", "symbolic links"), ("endless", "no plain file"),
        ("huge", "at most"), ("latin", "not UTF-8"), ("none", "No such file"), ("x" * 300, "too long"), ("a\0b", "that name"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused_and_not_waited_for(odd_files, name, says):
    assert says in line_of(lambda: read_text(odd_files / name, "the recipe"))


def test_a_file_of_the_largest_size_is_read_and_no_larger_one(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "in_all", lambda: reading.SHARE * 2**20)
    (tmp_path / "file").write_bytes(bytes(2**20))
    assert read_content(tmp_path / "file") == bytes(2**20)
    (tmp_path / "file").write_bytes(bytes(2**20 + 1))
    assert "has 1,048,577 bytes, and at most 1 MiB are read" in line_of(lambda: read_content(tmp_path / "file"))


def test_line_ends_are_those_of_python(tmp_path):
    (tmp_path / "file").write_bytes(b"a\r\nb\rc\n")
    assert read_text(tmp_path / "file") == "a\nb\nc\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is there twice"), ("[" * 5000 + "]" * 5000, "nested"),
        ("[" * 150 + "]" * 150, "more than 100 levels"), ('["\\u0000"]', "NUL"), ('{"\\ud800": 1}', "surrogate"),
        ("9" * 5000, "digits"), ("9" * 400, "more than 300 digits"), ("{", "not JSON"), ("", "not JSON"),
    ],
)  # fmt: skip
def test_json_that_nobody_can_use(text, says):
    assert says in line_of(lambda: parse_json(text, "the file"))


@pytest.mark.parametrize(
    "text",
    [
        "!!timestamp x", "!!int x", "!!bool x", "a: 2024-01-01", "a: 2024-13-45", "9" * 5000, "0x" + "f" * 5000, "&a [*a]",
        "a: &a [1]\na: 2", "[" * 1500, "1: 2", '"\\ud800"', '"\\0"', "? [a]\n: 1", "!!python/object:os.system x",
        "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{b}: &{b} [{f'*{a},' * 9}]\n" for a, b in pairwise("abcdefghi")),
    ],
)  # fmt: skip
def test_yaml_that_nobody_can_use(text):
    assert line_of(lambda: parse_yaml(text, "the recipe")).startswith("the recipe ")


def test_what_yaml_may_be():
    assert parse_yaml("a: &x [1, 2.5, null, true, text]\nb: *x\nc: {d: .inf}", "it")["b"] == [1, 2.5, None, True, "text"]


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000, "a\0b", "\ud800"])
def test_names_that_no_file_can_have(name):
    line_of(lambda: check_name(name))
    assert check_name("https://" + "x" * 300)


ABSURD = (
    "locate.examples", "tune.steps", "tune.text_batch_size", "tune.text_tokens", "tune.batch_size", "bench.limit",
    "bench.seeds", "bench.windows", "bench.window", "bench.contexts", "bench.batches", "bench.random_sites", "plan.width",
    "tune.lora.r", "tune.early_stopping.windows", "tune.early_stopping.examples",
    "locate.batch_size", "bench.batch_size", "tune.learning_rate", "tune.kl_weight",
)  # fmt: skip


@pytest.mark.parametrize("value", ["1000000000", str(10**30)])
def test_absurd_sizes_are_refused_before_anything_is_opened(value):
    for key in ABSURD:
        whole = ["tune.lora.target_modules=[in_proj]"] if "lora" in key else []
        assert key in line_of(lambda: read_recipe(None, [*whole, f"{key}={value}"], model="nowhere"))  # noqa: B023


@pytest.mark.parametrize(
    "settings",
    [
        ["tune.text_tokens=1000000", "tune.text_batch_size=1000"], ["bench.window=1000000", "bench.windows=1000"],
        ["bench.suites=speed", "bench.contexts=[1000000]", "bench.batches=[1000]"],
        ["tune.lessons=[{weight: 1e+308}, {weight: 1e+308}]"],
        ["data.train_text=[{source: a, weight: 1e+308}, {source: b, weight: 1e+308}]"],
    ],
)  # fmt: skip
def test_what_is_absurd_together(settings):
    line_of(lambda: read_recipe(None, settings, model="nowhere"))


def test_a_probe_takes_no_absurd_number():
    assert "no probe takes more" in line_of(lambda: make("copying", length=10**9))


def test_draws_are_those_of_one_call_however_they_are_asked_for():
    weights, count = [0.2, 3.0, 1.0], 500
    chosen, before, expected = random.Random("key").choices(range(3), weights, k=count), [0] * 3, []
    for choice in chosen:
        expected.append((choice, before[choice]))
        before[choice] += 1
    assert list(Draws("key", weights, count)) == expected
    backwards = Draws("key", weights, count)
    assert [backwards[i] for i in reversed(range(count))] == expected[::-1]
    assert Draws("key", weights, 10**9)[10:20] == expected[10:20], "a long training begins at once"
    assert len(Draws("key", weights, 10**9)) == 10**9


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sites": []}, "at least one site"), ({"starts": {"L0.H2": {}}}, "L0.H2 is not among the sites"),
        ({"starts": {"L0.H1": {}, "L00.H1": {}}}, "L00.H1 is not among the sites"),
        ({"starts": {"L0.H1": {"tau": 1e300}}}, "tau"),
    ],
)  # fmt: skip
def test_plans_that_splice_would_not_obey(tmp_path, change, says):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"sites": ["L0.H1"]} | change))
    assert says in line_of(lambda: Plan.read(path))


def test_a_plan_of_a_later_version(tmp_path):
    provenance = {"toolkit": "9", "created": "", "packages": {}, "machine": "", "threads": 1, "seed": 0, "base": "b",
                  "base_fingerprint": "f"}  # fmt: skip
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"sites": ["L0.H1"], "provenance": provenance | {"schema_version": 99}}))
    assert "schema_version is 99" in line_of(lambda: Plan.read(path))
    path.write_text(json.dumps({"sites": ["L0.H1"], "provenance": provenance}))
    assert Plan.read(path).provenance.schema_version == 1


@pytest.mark.parametrize(
    "line",
    [
        "null", "[1]", '{"prompt": 1, "answer": "a", "choices": ["a", "b"]}', "[" * 5000, '{"prompt": "p", "prompt": "q"}',
        '{"prompt": "p", "answer": "a", "choices": "ab"}', '{"prompt": "p", "answer": "a", "choices": ["b", "c"]}',
        '{"prompt": "p", "answer": "a", "choices": ["a", " a"]}',
        '{"prompt": " ", "answer": "a", "choices": ["a", "b"]}', '{"prompt": "\\ud800", "answer": "a", "choices": ["a", "b"]}',
        '{"prompt": "p", "answer": "a", "choices": ["a", {}]}',
        '{"prompt": "p", "answer": "a", "choices": ["a", "b"], "question": 3}',
    ],
)  # fmt: skip
def test_facts_that_are_none(tmp_path, line):
    path = tmp_path / "facts.jsonl"
    path.write_text('{"prompt": "p", "answer": "a", "choices": ["a", "b"]}\n' + line + "\n")
    assert "line 2" in line_of(lambda: Knowledge(str(path)).questions(1, 0))


@pytest.mark.parametrize("name", ["text.json", "text.jsonl"])
@pytest.mark.parametrize("line", ["null", "[" * 100_000, "3", '{"text": "a", "text": "b"}'])
@pytest.mark.parametrize("streaming", [True, False])
def test_json_that_would_end_the_process(tiny, tmp_path, name, line, streaming):
    """The reader of the package datasets ends with a segmentation fault."""
    pytest.importorskip("datasets")
    path = tmp_path / name
    path.write_text('{"text": "a document"}\n' + line + "\n")
    said = line_of(lambda: open_source(Text(source=str(path), streaming=streaming), Reading(tiny.tokenizer, 4, 0)))
    assert "line 2" in said


def test_a_folder_that_is_no_data_set(tiny, tmp_path):
    (tmp_path / "notes").mkdir()
    said = line_of(lambda: open_source(Text(source=str(tmp_path)), Reading(tiny.tokenizer, 4, 0)))
    assert "holds no file of" in said


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named_before_anything_is_written(surgery, tmp_path, value):
    folder = tmp_path / "broken"
    shutil.copytree(TINY, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["backbone.layers.1.mixer.D"][3] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    status, _, said = surgery("locate", folder, "--out", tmp_path / "out")
    assert status == 2
    assert "the weight 'backbone.layers.1.mixer.D' holds" in said
    assert not (tmp_path / "out").exists()


def test_minus_infinity_is_a_mask_and_no_broken_weight():
    module = torch.nn.Linear(2, 2)
    with torch.no_grad():
        module.bias[0] = -torch.inf
    assert not broken_weight(module)
    with torch.no_grad():
        module.bias[1] = torch.nan
    assert broken_weight(module) == "the weight 'bias' holds a NaN"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_key_that_a_configuration_has_twice(surgery, tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    text = (folder / name).read_text()
    (folder / name).write_text(text.replace("{", '{"added": 1, "added": 2,', 1))
    status, _, said = surgery("locate", folder, "--out", tmp_path / "out")
    assert status == 2
    assert "'added' is there twice" in said
    assert not (tmp_path / "out").exists()


def test_a_pipe_in_a_model_s_folder(surgery, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    status, _, said = surgery("locate", folder, "--out", tmp_path / "out")
    assert status == 2
    assert "no plain file" in said


@pytest.mark.parametrize("verb", ["bench", "plan"])
def test_arguments_too_long_for_a_file(surgery, verb):
    status, _, said = surgery(verb, *["x" * 300] * (2 if verb == "bench" else 1), "--out", "out")
    assert status == 2
    assert "too long for a file" in said
    assert not list(Path().iterdir())
