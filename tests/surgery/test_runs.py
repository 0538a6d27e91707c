"""What a run says before and while it works, what it decides by the clock, and what a resumed tuning goes on with."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from surgery.cli import tables
from surgery.errors import UserError
from surgery.jobs import run, tuning_stage
from surgery.jobs.stages import first_change
from surgery.jobs.tuning_stage import TUNED, tuned
from surgery.loading.opened import Checkpoint
from surgery.locating import budget
from surgery.locating.locate import locate
from surgery.models.pace import Pace
from surgery.records.plan import Plan
from surgery.records.recipe import Locate, Recipe, changed
from surgery.runtime import progress
from surgery.runtime.ownership.files import writing
from surgery.runtime.ownership.replacing import building
from surgery.statistics import Proportion

FEW = {"options": {"pairs": 3}, "examples": 8, "layers": False}


@pytest.mark.parametrize(
    ("seconds", "options", "exact"),
    [
        (1.0, {}, True),
        (1e6, {}, False),
        (1e6, {"exact": True}, True),  # obeyed, whatever it takes
        (1e6, {"exact": 0.2}, 0.2),
        (1e-6, {"exact": False}, False),
    ],
)
def test_heads_are_measured_exactly_within_the_budget(base, tokenizer, monkeypatch, capsys, seconds, options, exact):
    monkeypatch.setattr(budget, "forward_pace", lambda *_: Pace((seconds, 0.0)))
    ranking = locate(base, tokenizer, **FEW, **options)
    assert ranking.probe["exact"] == exact
    assert any(score.splice_loss is not None for score in ranking.heads) is bool(exact)
    said = " ".join(capsys.readouterr().err.split())
    assert ("by attribution alone" in said) is (seconds == 1e6 and options == {})
    assert "warning: the base is at chance on kv (pairs 3, keys lessons)" in said  # it is random
    assert ranking.chance == pytest.approx(1 / 3)


@pytest.mark.parametrize(("work", "low", "ends"), [(3000.0, 0.02, True), (3000.0, 0.04, False), (10.0, 0.02, False)])
def test_long_work_on_heads_that_mean_nothing_is_not_begun(work, low, ends, tmp_path):
    """Of a base at chance on what located them; what is short is done, and warned of, also on a busy machine."""
    job = SimpleNamespace(observer=SimpleNamespace(work_after=lambda _: work, time_after=lambda _: 3600.0), out=tmp_path)
    ranking = SimpleNamespace(base_accuracy=Proportion(accuracy=0.05, ci95=(low, 0.08), n=256), chance=1 / 32)
    if ends:
        with pytest.raises(UserError, match=r"about 60 min of work would follow: .* --resume --anyway"):
            run._Job.check_chance(job, ranking)
        (tmp_path / "tuning").mkdir()  # it was told to go on
        run._Job.check_chance(job, ranking)
    else:
        run._Job.check_chance(job, ranking)


def test_a_clock_does_not_decide_twice(base, tokenizer, tmp_path, monkeypatch):
    """An interrupted search goes on with its decision, unless it is asked for something else."""
    options = Locate(**FEW)
    small, large = {"model": "small"}, {"model": "large"}
    with writing(tmp_path):
        assert budget._decided(tmp_path / "exact.json", options, small, exact=False) is False
        assert budget._decided(tmp_path / "exact.json", options, small, exact=True) is False
        assert budget._decided(tmp_path / "exact.json", options.model_copy(update={"layers": True}), small, exact=True) is True
        assert budget._decided(tmp_path / "exact.json", options, large, exact=False) is False  # another model has another cost


def test_a_decision_that_was_kept_is_said_as_one(base, tokenizer, tmp_path, monkeypatch, capsys):
    """What would fit the budget now is not said to take longer than the budget."""
    for seconds in (1e6, 1e-6):
        monkeypatch.setattr(budget, "forward_pace", lambda *_, seconds=seconds: Pace((seconds, 0.0)))
        assert locate(base, tokenizer, **FEW, kept=tmp_path).probe["exact"] == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("more than 10 min") == 1
    assert said.count("as this search began") == 1


def test_the_first_stage_whose_settings_changed():
    recipe = Recipe(model="base")
    assert first_change(recipe, recipe) is None
    assert first_change(recipe, changed(recipe, tune={"save_steps": 7})) is None  # of no consequence for the result
    for changes, stage, key in (
        ({"bench": {"limit": 9}}, "bench", "bench.limit"),
        ({"tune": {"steps": 9}, "bench": {"limit": 9}}, "tune", "tune.steps"),
        ({"data": {"facts": "capitals"}}, "plan", "data.facts"),  # whose bounds ask about them
        ({"plan": {"heads": 2}, "tune": {"steps": 9}}, "plan", "plan.heads"),
        ({"locate": {"options": {"pairs": 9}}, "plan": {"heads": 2}}, "locate", "locate.options.pairs"),
        ({"seed": 9}, "locate", "seed"),
    ):
        change = first_change(recipe, changed(recipe, **changes))
        assert (change.stage, change.key) == (stage, key)
        assert str(change).endswith(f"going on from {stage}")


def test_a_tuning_of_other_heads_is_not_gone_on_with(base, tokenizer, tmp_path, monkeypatch):
    """Their grafts have the same names and shapes, so the checkpoints would fit."""
    resumed = []
    monkeypatch.setattr(tuning_stage, "tune", lambda *_, resume, **__: resumed.append(resume) or [])
    checkpoint = Checkpoint("base", base, tokenizer, "f")
    recipe = Recipe(model="base")

    def go_on(plan, recipe=recipe, layers=None):
        tuned(base, checkpoint, recipe, tmp_path, plan=plan, layers=layers, resume=True, digest="d")
        with writing(tmp_path), building(tmp_path / "checkpoint-1") as new:
            new.replace()

    first, second = Plan(sites=("L1.H3",)), Plan(sites=("L1.H5",))
    for plan, settings in (
        (first, recipe), (first, recipe), (second, recipe), (second, changed(recipe, tune={"steps": 3})),
        (second, changed(recipe, tune={"steps": 3}, bench={"limit": 3})),
    ):  # fmt: skip
        go_on(plan, settings)
    assert resumed == [False, True, False, False, True]
    assert json.loads((tmp_path / TUNED).read_text())["plan"]["sites"] == ["L1.H5"]
    go_on(None, layers=[1])
    assert resumed[-1] is False


def test_tables_fit_the_terminal_and_break_no_figure(capsys):
    header = ["model", *(f"KV {2**i}, unseen keys" for i in range(9)), "difference"]
    body = [["control_random_site_tuned", *["0.123"] * 9, "+0.123 [-0.456, +0.789]"] for _ in range(3)]
    tables.print_table(header, body)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("control_random_site_tuned" in line for line in lines) >= 6  # in parts, each with the first column
    assert sum(line.count("0.123 ") for line in lines) == 3 * 10
    assert sum("+0.123 [-0.456, +0.789]" in line for line in lines) == 3


def test_plain_lines_say_what_is_left(monkeypatch, capsys):
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    for _ in progress.Track(range(3), "work"):
        pass
    assert capsys.readouterr().err.splitlines() == [
        "work: 1/3, about 40 s left", "work: 2/3, about 20 s left", "work: 3/3, about 1 s left",
    ]  # fmt: skip


def test_what_is_resumed_is_counted_from_where_it_stood(monkeypatch, capsys):
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    for _ in progress.Track(range(2), "work", 12, before=10):
        pass
    assert capsys.readouterr().err.splitlines() == ["work: 11/12, about 20 s left", "work: 12/12, about 1 s left"]
    out = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=out, force_terminal=True, width=60))
    with progress._row("work", 12, before=10) as (display, row):
        display.refresh()
        assert "10/12, 1 s so far" in out.getvalue()
        display.update(row, advance=1)
        display.refresh()
        assert "11/12, about" in out.getvalue()


def test_a_long_line_is_broken_between_words_on_a_terminal_alone(monkeypatch):
    line = "logits differ by at most 6.7e-06 after prompts of 1, 6, 17 and 40 tokens, alone and in a padded batch"
    for terminal in (True, False):
        out = io.StringIO()
        monkeypatch.setattr(progress, "console", Console(file=out, force_terminal=terminal, width=60))
        progress.say(line)
        lines = out.getvalue().splitlines()
        assert " ".join(map(str.strip, lines)) == line
        assert (max(map(len, lines)) <= 60) == terminal


def test_a_bar_is_there_from_the_beginning(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=out, force_terminal=True, width=60))
    with progress.busy("outer"), progress.counting(3, "inner") as advance:
        assert "outer" in out.getvalue()
        advance()
        progress._display[0].refresh()
        assert "inner" in out.getvalue()
    assert progress._display == []
