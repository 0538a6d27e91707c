"""The whole job on a built-in model, small: what it writes, and what it does not do again."""

import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import PreTrainedConfig

from surgery import automatic, pipeline
from surgery.cli.run import resumed
from surgery.errors import UserError
from surgery.exporting import export as exporting
from surgery.look import look
from surgery.models.load import load
from surgery.records.recipe import read_recipe, recipe_text
from surgery.records.report import Report
from surgery.runtime.files import open_output
from surgery.tuning.loop import TuningLog
from tests.surgery.exporting.folders import InProcess

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "checkpoints" / "tiny-mamba2")
FEW = (
    "locate.examples=8 locate.options.pairs=4 locate.roles=0 plan.heads=1 tune.steps=2 tune.batch_size=2 "
    "tune.text_batch_size=1 bench.limit=4 bench.pairs=[4] bench.windows=2 bench.window=64 bench.contexts=[] "
    "bench.controls=[same_layer] tune.lora.target_modules=out_proj tune.lora.r=2"
).split()
STAGES = ("locate", "choose", "tune", "bench", "write_export")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text to tune on, and later a run."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "text.txt").write_text("Anna lives in Rome. " * 400)
    return folder


def make_recipe(place, *settings):
    return read_recipe(None, [*FEW, f"data.train_text=[{place / 'text.txt'}]", *settings], model=BASE)


@pytest.fixture(scope="module")
def stages():
    """The stages that are called, in order."""
    called = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "start_reader", lambda _: InProcess())
        for name in STAGES:
            work = getattr(pipeline, name)
            patch.setattr(pipeline, name, lambda *a, _name=name, _work=work, **k: (called.append(_name), _work(*a, **k))[1])
        yield called


@pytest.fixture(scope="module")
def ran(place, stages):
    """The folder of a finished run, which said a line after each stage and control."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "say", said.append)
        pipeline.run(make_recipe(place), place / "out")
    stages_said = ["locate", "plan", "tuning tuned", "tuning control_same_layer", "bench", "export"]
    assert [line.partition(":")[0] for line in said] == stages_said
    assert stages == ["locate", "choose", "tune", "tune", "bench", "write_export"]
    return place / "out"


def test_a_run_leaves_each_stages_file(ran):
    held = {path.relative_to(ran).as_posix() for path in ran.rglob("*") if path.is_file()}
    assert {"ranking.json", "plan.json", "recipe.yaml", "report.json", "report.md", "report.html", "hybrid/config.json"} <= held
    report = Report.read(ran / "report.json")
    assert list(report.models) == ["base", "spliced", "tuned", "control_same_layer"]
    hybrid, _ = load(ran / "hybrid")
    adapters = 4 * 2 * sum(hybrid.backbone.layers[0].mixer.out_proj.weight.shape)
    assert report.models["tuned"].trained == adapters + sum(p.numel() for p in hybrid.graft_parameters().values())


@pytest.mark.parametrize(
    ("settings", "since", "remedy", "setting"),
    [
        ("tune.steps=auto tune.max_steps=8", 0, "more heads", "tune.max_steps=16"),
        ("tune.steps=auto", 2, "more heads", "plan.heads=2"),
        ("tune.steps=auto plan.heads=auto", 2, "more heads", None),  # no further head helped
        ("tune.steps=auto plan.heads=auto plan.max_heads=1", 2, "more heads", "plan.max_heads=2"),
        ("plan.sites=L0.H1", 0, "more heads", None),
        ("tune.steps=auto", 2, "", None),
    ],
)
def test_the_last_line_is_a_command_that_goes_on(ran, tmp_path, monkeypatch, place, settings, since, remedy, setting):
    recipe, out = make_recipe(place, *settings.split()), tmp_path / "my run"
    (out / "tuning" / "tuned" / "checkpoint-2").mkdir(parents=True)
    (out / "tuning" / "tuned" / "checkpoint-2" / "state.json").write_text(f'{{"watcher": {{"since": {since}}}}}')
    (out / "recipe.yaml").write_text(recipe_text(recipe))
    report = Report.read(ran / "report.json")
    report = report.model_copy(update={"verdict": report.verdict.model_copy(update={"remedy": remedy})})
    line = automatic.go_on(recipe, report, out)
    if since == 0 and recipe.tune.steps == "auto":  # a control, whose loss still fell, is named
        shutil.copytree(out / "tuning" / "tuned", out / "tuning" / "control_same_layer")
        assert "and that of controls, still fell" in automatic.go_on(recipe, report, out)
    if setting is None:
        assert line == ""
        return
    words = shlex.split(line.rpartition(": ")[2])
    assert words == ["surgery", "run", str(out / "recipe.yaml"), "--set", setting, "--out", f"{out}-2"]
    assert read_recipe(Path(words[2]), [words[4]]) == make_recipe(place, *settings.split(), setting)
    monkeypatch.chdir(out)
    assert automatic.go_on(recipe, report, Path(".")).endswith("my run-2'")
    shutil.rmtree(out / "tuning" / "tuned" / "checkpoint-2")
    automatic.go_on(recipe, report, out)


def test_what_is_done_is_done_again_from_the_stage_on_whose_settings_changed(ran, place, stages):
    def resume(*settings):
        stages.clear()
        pipeline.run(make_recipe(place, *settings), ran, resume=True)
        return stages

    assert resume() == []
    assert resume("bench.limit=5") == ["tune", "tune", "bench", "write_export"]  # a tuning that is finished takes no step
    assert resume("bench.limit=5", "plan.gate=0.75") == ["choose", "tune", "tune", "bench", "write_export"]
    (place / "text.txt").write_text("Bruno lives in Oslo. " * 400)
    assert "choose" in resume("bench.limit=5", "plan.gate=0.75")
    (place / "tasks").mkdir()
    settings = "bench.limit=5", "plan.gate=0.75", f"bench.include_path={place / 'tasks'}"
    assert "bench" in resume(*settings)
    assert resume(*settings) == []
    shutil.rmtree(ran / "hybrid")
    assert "write_export" in resume(*settings)
    (place / "tasks" / "mine.yaml").write_text("task: mine\n")
    assert "bench" in resume(*settings)


@pytest.mark.parametrize(
    "setting",
    [
        "plan.sites=L9.H0",
        "plan.kind=layer plan.donor=no-such bench.controls=[]",
        "'tune.lora={{target_modules: no_such}}'",
        "'tune.examples=[{{probe: kv, options: {{pairs: [4, 1000]}}}}]'",
        "bench.pairs=[1000]",
        "data.facts={place}/facts.jsonl",
        "data.held_out_text={place}/short.txt",
        "data.held_out_text={place}/text.txt",
    ],
)
def test_what_a_later_stage_could_not_do_is_said_before_any_work(place, stages, tmp_path, setting):
    (place / "facts.jsonl").write_text('{"prompt": "Rome is in", "anser": " Italy"}\n')
    (place / "short.txt").write_text("Carla lives here.")
    stages.clear()
    recipe = make_recipe(place, *(each.format(place=place) for each in shlex.split(setting)))
    with pytest.raises(UserError):
        pipeline.run(recipe, tmp_path / "out")
    assert stages == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "rate"), [("tuned", 0.01), ("control_tuned", 0.002), ("control_same_layer", 0.01)])
def test_weights_of_the_base_learn_at_a_rate_of_their_own(place, tmp_path, monkeypatch, name, rate):
    rates = []
    monkeypatch.setattr(pipeline, "tune", lambda *given, **named: rates.append(given[2].learning_rate) or TuningLog())
    for width in (128, 512):
        models = {"base": None, name: SimpleNamespace(config=PreTrainedConfig(hidden_size=width))}
        with open_output(tmp_path / str(width)) as output:
            pipeline._tune(models, name, None, make_recipe(place, "tune.learning_rate=0.01"), output, {})
    assert rates == pytest.approx([rate, rate if rate == 0.01 else rate / 2], rel=1e-3)


def test_what_is_refused_leaves_an_earlier_run_as_it_was(ran, place):
    hybrid = ran / "hybrid"
    with pytest.raises(UserError, match="reads"):
        pipeline.run(read_recipe(None, FEW, model=str(hybrid)), ran, overwrite=True)
    for wrong in ("plan.sites=L99.H0", "plan.width=1", "tune.lora.target_modules=[none]", "bench.pairs=[100000]"):
        with pytest.raises(UserError):
            pipeline.run(make_recipe(place, wrong), ran, overwrite=True)
    assert (ran / "report.json").exists()
    assert (hybrid / "model.safetensors").exists()


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        model, tokenizer = load(BASE)
        first = look(model, tokenizer)
        patch.setattr("surgery.look._measure", None)  # what one look has measured the next one reads
        assert look(model, tokenizer) == first
        assert look(model, tokenizer, name="mine").model == "mine"
    return first


def test_a_first_look_says_what_can_be_edited_and_whether_it_is_worth_it(seen):
    assert seen.editable == (0, 1, 2, 3)
    assert (seen.units, seen.channels) == (8, None)
    assert seen.worth
    assert seen.pairs in seen.retrieval
    assert [held.context for held in seen.held] == sorted(held.context for held in seen.held)
    assert seen.steps.startswith("L0 convolution gathers at the ends of records; L0 aggregates at the query")
    assert seen.steps in str(seen)


def test_a_recipe_is_chosen_that_settings_change(seen, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chosen = automatic.choose_recipe(seen, BASE, None, ["tune.steps=7"])
    assert chosen.tune.steps == 7
    assert chosen.locate.options["pairs"] == seen.pairs
    text = tmp_path / "text.txt"
    text.write_text("One line of text.\n" * 2000)
    with_text = automatic.choose_recipe(seen, BASE, text, [])
    parts = [Path(name).read_text() for name in (*with_text.data.train_text, with_text.data.held_out_text)]
    assert "".join(parts) == text.read_text()
    assert automatic.estimate(with_text, seen).memory > seen.parameters * 4
    recipes = [automatic.choose_recipe(seen, BASE, text, [f"locate.roles={n}"]) for n in (0, 8)]
    without, roles = (automatic.estimate(recipe, seen).seconds["locate"] for recipe in recipes)
    assert 8 < roles / without < 25  # 12.6 by processor time, on tiny-skills


def test_resume_goes_on_with_the_recipe_that_was_chosen(seen, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("One line of text.\n" * 2000)
    chosen = automatic.choose_recipe(seen, BASE, text, ["tune.steps=7"])
    (tmp_path / "recipe.yaml").write_text(recipe_text(chosen))
    assert resumed(tmp_path / "recipe.yaml", BASE, None, []) == chosen
    assert resumed(tmp_path / "recipe.yaml", BASE, text, ["tune.steps=8"]).tune.steps == 8
    text.write_text("Another line of text.\n" * 2000)
    assert resumed(tmp_path / "recipe.yaml", BASE, text, []).data.train_text != chosen.data.train_text
    with pytest.raises(UserError):
        resumed(tmp_path / "recipe.yaml", str(Path(BASE).parent / "tiny-llama"), None, [])
