"""Sizes within their bounds that a machine cannot hold are refused before anything is allocated."""

import pytest

from surgery.errors import UserError
from surgery.jobs import preparing
from surgery.jobs.preparing import check_bench, check_tuning
from surgery.records.recipe import Bench, Recipe, Tune

KIB = 2**10


@pytest.fixture
def memory(monkeypatch):
    """Sets what the machine has."""
    return lambda amount: monkeypatch.setattr(preparing, "capacity", lambda _: amount)


def test_the_least_is_the_states_of_one_layer(base, memory):
    """4 rows of 64 tokens, 64 numbers wide, of 4 bytes."""
    options = Tune(text_batch_size=4, text_tokens=64)
    memory(64 * KIB)
    check_tuning(options, base)
    memory(64 * KIB - 1)
    line = "4 x 64 tokens at once have states of 64 KiB in one layer alone, and cpu has 64 KiB in all; choose smaller"
    with pytest.raises(UserError, match=f"tune.text_batch_size, tune.text_tokens: {line}"):
        check_tuning(options, base)
    for change in ({"text_batch_size": 0}, {"text_tokens": 63}, {"gradient_accumulation_steps": 2}):
        check_tuning(options.model_copy(update=change), base)


def test_a_window(base, memory):
    memory(64 * KIB)
    check_bench(Bench(window=256), base)
    with pytest.raises(UserError, match=r"bench.window: 1 x 257 tokens at once"):
        check_bench(Bench(window=257), base)


@pytest.mark.parametrize(
    ("verb", "settings"),
    [
        ("run", "tune.text_tokens=64"), ("bench", "bench.window=64"), ("tune", "tune.text_tokens=64"),
    ],
)  # fmt: skip
def test_every_verb_refuses_them_before_it_writes(surgery, base, tokenizer, tmp_path, memory, verb, settings):
    from surgery.exporting.export import export
    from surgery.records.plan import Plan
    from surgery.splicing.splice import splice

    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    plan = Plan(sites=("L1.H3",))
    if verb in ("bench", "tune"):
        export(splice(base, plan), tmp_path / "hybrid", tokenizer=tokenizer, plan=plan, base="base", verify="tensors")
    (tmp_path / "run.yaml").write_text("model: base\n")
    assert Recipe(model="base").tune.text_tokens > 16
    before = set(tmp_path.rglob("*"))
    memory(15 * KIB)
    called = {"run": ["run", "run.yaml"], "bench": ["bench", "base", "hybrid"], "tune": ["tune", "hybrid"]}[verb]
    small = ["tune.text_batch_size=1", "tune.text_tokens=16", "bench.window=16"]
    small = [setting for setting in small if verb == "run" or setting.startswith(verb)]
    given = [part for setting in (*small, settings) for part in ("--set", setting)]
    status, _, said = surgery(*called, "--out", "out", *given)
    assert (status, "in one layer alone" in " ".join(said.split())) == (2, True), said
    assert set(tmp_path.rglob("*")) == before
