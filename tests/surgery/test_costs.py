"""What a run will cost: exact counts, memory that is the weights', nothing written, and advice where it does not fit."""

import hashlib
import io
import json
import sys
import time
from contextlib import contextmanager, redirect_stdout
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import surgery
from surgery.cli import app as cli
from surgery.commands import comparison
from surgery.costs import announced, counts, estimate, rehearsal
from surgery.costs import run as announcing
from surgery.costs.counts import benching
from surgery.costs.models import assumed, held_beyond, models_of, remap_layers, storages, truncate_layers, weights_of
from surgery.costs.record import CostEstimate, Stage, fitting_advice
from surgery.costs.searching import skill_passes
from surgery.errors import UserError
from surgery.evaluation.bench import measure
from surgery.jobs import run as job
from surgery.jobs.observer import Observer
from surgery.jobs.output_folder import Run
from surgery.loading.digests import model_digest
from surgery.loading.opened import Checkpoint
from surgery.locating import prefilter
from surgery.locating.locate import rank
from surgery.locating.passes import passes
from surgery.locating.questions import question_sets
from surgery.locating.recording import Walk
from surgery.locating.skill_scores import skill_sets
from surgery.locating.subject import Subject
from surgery.models import pace
from surgery.models.pace import Pace, Piece, Work, forward_pace, paced
from surgery.records.plan import Plan
from surgery.records.recipe import Data, Locate, Tune, read_recipe
from surgery.runtime import memory
from surgery.runtime.ownership.files import writing
from surgery.runtime.timing import Stopwatch, slowed
from surgery.splicing.splice import adopt, graft_parameters, splice
from surgery.tuning.loop import started_run, tune
from surgery.tuning.micro_batches import MicroBatches
from tests.models import BASES, names, random_base

RECIPE = """
locate: {options: {pairs: 4}, examples: 12, batch_size: 4, exact: true}
tune: {steps: 3, batch_size: 2, lessons: [{options: {pairs: [2, 4]}, queries: 2}], text_batch_size: 1, text_tokens: 24,
       skill_batch_size: 2}
bench: {pairs: [4], limit: 6, windows: 2, window: 32, contexts: [16], batch_size: 4, random_sites: 1}
"""


@pytest.fixture(scope="module", autouse=True)
def measured_briefly():
    """Of steps and batches less than outside the tests: how well they foretell a duration is looked at nowhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "COUNTED", 64)
        patch.setattr(rehearsal, "SECONDS", 0.01)
        patch.setattr(pace, "SECONDS", 0.01)
        yield


@pytest.fixture(scope="module")
def folder(base, tokenizer, tmp_path_factory):
    """A base and a recipe for it."""
    folder = tmp_path_factory.mktemp("costs")
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    (folder / "quick.yaml").write_text(f"model: {folder / 'base'}\n{RECIPE}")
    return folder


@pytest.fixture(scope="module")
def estimated(folder):
    """The estimate of the whole recipe, and the folder's digests before and after."""
    before = digests(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        estimate = surgery.estimate(read_recipe(folder / "quick.yaml"))
    return estimate, before, digests(folder)


def digests(folder):
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*") if file.is_file()}


class Counted:
    """Counts the calls of functions by name."""

    def __init__(self, monkeypatch):
        self.patch, self.calls = monkeypatch, {}

    def watch(self, owner, name, called=None):
        own, called = getattr(owner, name), called or name
        self.calls[called] = 0

        def counting(*args, **kwargs):
            self.calls[called] += 1
            return own(*args, **kwargs)

        self.patch.setattr(owner, name, counting)


@contextmanager
def shapes_of(model):
    """(rows, tokens) of every forward of a model."""
    shapes = []
    handle = model.register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield shapes
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "options",
    [{"exact": True}, {"exact": True, "layers": False, "seeds": 2}, {"exact": False, "seeds": 2}, {"exact": 0.2}],
    ids=str,
)
def test_the_passes_of_a_search_are_those_that_it_makes(base, tokenizer, monkeypatch, options, tmp_path):
    subject = Subject.of(base, tokenizer)
    options = Locate(options={"pairs": 4}, examples=8, batch_size=4, **options)
    sets = question_sets(tokenizer, options, seed=0, device=base.device)
    own = passes(sets, options, heads=24, layers=3)
    skills = skill_passes(skill_sets(subject, Data(), options, sets[0], seed=0), options, heads=24)
    counted = Counted(monkeypatch)
    counted.watch(Walk, "logits")
    counted.watch(prefilter, "attribute_starts")
    rank(subject, options, kept=tmp_path)
    assert skills.slopes > 0
    forwards = sum(part.base + 3 * part.walks + part.variants for part in (own, skills))
    assert counted.calls["attribute_starts"] == sum(part.starts + part.slopes for part in (own, skills))
    if own.at_most:
        assert counted.calls["logits"] <= forwards
    else:
        assert counted.calls["logits"] == forwards
    assert own.at_most is skills.at_most is (options.exact == 0.2)


def test_the_tokens_of_a_step_are_those_of_its_batches(base, tokenizer, monkeypatch):
    """Lessons, text, and questions about other skills."""
    options = Tune(steps=rehearsal.BUFFER, batch_size=2, text_batch_size=1, text_tokens=24, skill_batch_size=3)
    tokens, own = [], MicroBatches.split

    def split(self, key, batch):
        tokens.append([part[0].numel() for part in batch])
        return own(self, key, batch)

    monkeypatch.setattr(MicroBatches, "split", split)
    tune(splice(base, Plan(sites=("L1.H3",))), tokenizer, options)
    work, _ = rehearsal.step_work(tokenizer, options, Data(), 0)
    assert len(tokens) == options.steps
    assert all(len(parts) == 3 for parts in tokens)
    assert work.tokens == pytest.approx(sum(map(sum, tokens)) / len(tokens))
    assert work.largest == max(map(sum, tokens))


def test_plans_that_are_bounded_are_counted(tokenizer):
    """Where skills bound what a perfect choice proposes."""
    few = ["plan.by=choice", "plan.heads=3", "plan.auto.candidates=2", "plan.auto.skill_examples=4", "plan.auto.examples=4"]
    bounded = read_recipe(None, few, model="none")
    free = read_recipe(None, [*few, "data.skills=[]"], model="none")
    gates, finalists = len(bounded.plan.auto.gates), bounded.plan.auto.finalists
    more = counts.plans_measured(bounded, 24).plans - counts.plans_measured(free, 24).plans
    assert more == 1 + 3 * gates + finalists  # the base; three, two and one of the heads
    assert counts.planning(bounded, tokenizer, 24).calls > counts.planning(free, tokenizer, 24).calls


def test_the_forwards_of_the_bench_are_those_that_it_makes(base, tokenizer):
    recipe = read_recipe(None, ["bench.pairs=[2,4]", "bench.limit=10", "bench.batch_size=4"], model="none")
    options = recipe.bench.model_copy(update={"windows": 20, "window": 16, "contexts": (16, 32)})
    counted = benching(recipe.model_copy(update={"bench": options}), base, tokenizer)
    assert counted.exact
    assert not counted.at_most
    assert counted.encoding > 0
    with shapes_of(hybrid := splice(base, Plan(sites=("L0.H1",)))) as shapes:
        measure({"hybrid": hybrid}, tokenizer, options)
    assert counted.work == Work.of(shapes)


@pytest.mark.parametrize("family", ["plain", "mamba", "falcon mamba", "llamba"])
def test_the_first_layers_of_a_model_are_its_own_tensors(family):
    model = adopt(BASES[family]()).eval()
    shallow = truncate_layers(model, 2)
    assert storages([shallow]).keys() <= storages([model]).keys()
    seen = {}
    model.base_model.layers[1].register_forward_hook(lambda _, __, returned: seen.update(states=returned))
    shallow.base_model.layers[1].register_forward_hook(lambda _, __, returned: seen.update(cut=returned))
    ids = torch.arange(5)[None] + 1
    with torch.no_grad():
        model(ids)
        shallow(ids)
    first, second = (value[0] if isinstance(value, tuple) else value for value in (seen["states"], seen["cut"]))
    assert torch.equal(first, second)


def test_what_the_models_of_a_run_hold_beside_the_base_is_what_they_train(base, tokenizer, folder):
    recipe = read_recipe(folder / "quick.yaml")
    base = adopt(base)
    entries, tuned = models_of(base, recipe, assumed(recipe, base))
    hybrids = [entry.model for entry in entries.values() if entry.plan is not None]
    grafts = sum(p.nbytes for model in hybrids for p in graft_parameters(model).values())
    buffers = sum(b.nbytes for model in hybrids for name, b in model.named_buffers() if ".graft." in name)
    mixer = sum(t.nbytes for t in base.backbone.layers[0].mixer.parameters())
    held = held_beyond(entries.values(), base)
    assert grafts + mixer <= held <= grafts + mixer + buffers + 4096 * len(entries)
    assert tuned["control_tuned"].first == 0
    assert tuned["control_tuned"].numbers == mixer / 4


def test_an_estimate_names_every_stage_and_writes_nothing(estimated, folder):
    estimate, before, after = estimated
    assert before == after
    names = [stage.name for stage in estimate.stages]
    assert names[:3] == ["locate", "tune tuned", "tune control_tuned"]
    assert names[-2:] == ["bench", "export"]
    stages = {stage.name: stage for stage in estimate.stages}
    assert stages["tune tuned"].counts == {"steps": 3}
    assert stages["locate"].counts["forwards"] == 3
    assert all(stage.seconds > 0 for stage in estimate.stages)
    assert all(memory.resident() / 4 < stage.memory < estimate.available for stage in estimate.stages)
    tensors = load_file(folder / "base" / "model.safetensors").values()
    assert stages["export"].disk == weights_of(surgery.load(folder / "base").model) == sum(t.nbytes for t in tensors)
    assert estimate.fits
    assert estimate.advice == ()
    assert "the grafts are taken to be in the first layers" in str(estimate)
    assert CostEstimate.model_validate_json(estimate.text()) == estimate


def lines_of(said):
    """What was written on lines of its own, the first included; a bar that is drawn over begins with a carriage return."""
    return [line.strip() for line in said.replace("\r", "\n").splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("announced")
def test_a_run_does_what_was_estimated(estimated, folder, tmp_path, monkeypatch, capsys):
    """And says it of each stage; measuring changes neither the weights nor what is drawn at random."""
    recipe = read_recipe(folder / "quick.yaml")
    monkeypatch.setattr(announced, "SHORT", 0.0)
    report = surgery.run(recipe, tmp_path / "out")
    said = capsys.readouterr().err
    stages = {stage.name: stage for stage in estimated[0].stages}
    assert report.timings.keys() == report.memory.keys() == stages.keys()
    for name in report.timings:
        assert any(line.startswith(f"{name}: ") and " left in all" in line for line in lines_of(said)), said
    monkeypatch.setattr(announced, "SHORT", 120.0)  # a short run says nothing of its cost
    silent = surgery.run(recipe, tmp_path / "silent")
    said = capsys.readouterr().err
    assert "left in all" not in said
    for name, model in report.models.items():
        assert model.conditions.model == silent.models[name].conditions.model
    assert report.training == silent.training


def test_the_public_run_is_that_of_the_core_with_an_observer(monkeypatch):
    """And hands on all that it takes."""
    public, own = signature(announcing.run).parameters, dict(signature(job.run).parameters)
    assert own.pop("observe").default is Observer
    assert public == own
    given = {name: object() for name in public}
    monkeypatch.setattr(job, "run", lambda recipe, out, **options: {"recipe": recipe, "out": out, **options})
    assert announcing.run(**given) == {**given, "observe": announced.Announced}


def test_a_run_that_nobody_watches_says_nothing_of_its_cost(capsys):
    observer = Observer(None, None, None, "auto")
    observer.starts("locate")
    observer.ended("locate", 1.0, 2.0)
    assert observer.work_after("locate") == observer.time_after("locate") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.usefixtures("announced")
def test_what_does_not_fit_is_said_before_the_work(folder, monkeypatch, capsys):
    recipe = read_recipe(folder / "quick.yaml")
    monkeypatch.setattr(announced, "SHORT", 0.0)
    monkeypatch.setattr(estimate.memory, "available", lambda _: -(2**20))
    loaded = surgery.load(folder / "base")
    before, state = model_digest(loaded.model), torch.random.get_rng_state()
    announced.Announced(recipe, loaded, folder / "out", "auto").starts("bench")
    said = " ".join(capsys.readouterr().err.split())
    assert "warning: bench does not fit: it needs" in said
    assert "warning: export does not fit: it needs" in said
    assert "locate" not in said  # it is behind
    assert "left in all" in said
    assert model_digest(loaded.model) == before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not (folder / "out").exists()


@pytest.mark.parametrize(("available", "free"), [(2**40, 2**40), (2**20, 2**40), (2**40, 10)])
def test_what_does_not_fit_is_advised_on(folder, available, free):
    """By memory and by disk, of which a machine has too little."""
    recipe = read_recipe(folder / "quick.yaml")
    costs = estimate.Costs(recipe, surgery.load(folder / "base"), 1.0)
    costs.available = available
    stages = [Stage(name="export", seconds=1.0, memory=2**30, disk=2**20)]
    said = costs.advice(stages, free)
    assert any("export does not fit: it needs 1.0 GiB, and 1.0 MiB are there." in line for line in said) is (available == 2**20)
    assert any("The disk has 0 KiB free, and the run needs 1.0 MiB" in line for line in said) is (free == 10)
    assert bool(said) is (min(available, free) < 2**40)


def test_advice_names_a_setting_and_a_value():
    stage = Stage(name="bench", seconds=1.0, memory=10 * 2**30)
    said = fitting_advice(stage, 2 * 2**30, 6 * 2**30, {"bench.batch_size": 64}, "Take another machine.")
    assert said == "bench does not fit: it needs 10.0 GiB, and 6.0 GiB are there. Try --set bench.batch_size=32."
    for available, settings in ((2**30, {"bench.batch_size": 64}), (6 * 2**30, {}), (6 * 2**30, {"bench.batch_size": 1})):
        assert fitting_advice(stage, 2 * 2**30, available, settings, "Take another machine.").endswith("another machine.")


def test_a_pace_is_a_line_through_two_sizes():
    def measure(size):
        sizes.append(size)
        return Piece(size, (9.0, 1 + size / 100, 0.5), 50 + 3 * size, 2.0)

    sizes = []
    line = paced(measure, 10, 700, 10.0)
    assert sizes == [10, 40]  # after this, another might take longer than 10 s on the wall
    assert line.time(Work(3, 1000)) == pytest.approx(3 + 10)
    assert line.memory(1000) == pytest.approx(3050)
    assert line.memory(0) == 0
    assert line.slowed == 2
    sizes.clear()
    paced(measure, 10, 700, 1000.0)
    assert sizes == [10, 40, 160, 640, 700]
    noisy = paced(lambda size: Piece(size, (1 / size,)), 1, 2, 10.0)  # nothing costs less the larger it is
    assert noisy.seconds == (0, 0.25)


def test_paces_go_on_from_two_depths():
    low, high = Pace((1.0, 0.2), (10, 5), 1.1), Pace((1.5, 0.1), (20, 7), 1.4)
    assert low.along(high, 31) == Pace((16.5, 0.2), (320, 67), 1.4)


def test_a_forward_is_run_as_it_will_be(base, monkeypatch):
    """On a part of the batch, and on all of it where that is quick."""
    monkeypatch.setattr(pace, "SECONDS", 4.0)
    with shapes_of(base) as shapes:
        line = forward_pace(base, torch.ones(6, 50, dtype=torch.long), memory=True)
    assert [*dict.fromkeys(shapes)] == [(1, 32), (2, 50), (6, 50)]
    assert line.time(Work(1, 300)) > 0
    assert line.memory(300) > line.memory(30) > 0


def test_a_time_is_a_range_and_a_busy_machine_is_said(estimated):
    stage = Stage(name="tune tuned", seconds=600.0, memory=2**30, at_most=True)
    assert stage.line(2.0, 2.0) == "tune tuned: at most 40 min, 1.0 GiB"
    quiet = estimated[0].model_copy(update={"load": 0.2, "slowed": 1.3})
    assert quiet.busy() == ""
    for change in ({"load": 3.0}, {"slowed": 2.0}):
        assert "This machine is busy" in quiet.model_copy(update=change).lines()[0]
    whole = dict(zip(*(quiet.table()[0], quiet.table()[1][-2]), strict=True))
    assert whole["stage"] == "in all"


def test_what_was_measured_replaces_the_estimate(base, tokenizer, folder, monkeypatch, capsys):
    """Of a stage's kind, from the first on that is done; and a machine that has become busy makes all others longer."""
    loaded = Checkpoint("base", base, tokenizer, "f" * 64)
    told = announced.Announced(read_recipe(folder / "quick.yaml"), loaded, folder, "auto")
    names = ("locate", "tune tuned", "tune control_tuned", "bench")
    told._stages = {name: Stage(name=name, seconds=600.0, memory=2**30) for name in names}

    def said(name):
        told.starts(name)
        return capsys.readouterr().err.strip()

    assert said("tune tuned") == "tune tuned: 8 min to 13 min, 1.0 GiB; about 30 min left in all"
    told.ended("tune tuned", 1200.0, 1200.0)
    assert said("tune control_tuned") == "tune control_tuned: 17 min to 23 min, 1.0 GiB; about 30 min left in all"
    told.ended("splice", 1.0, 9.0)  # of what was not estimated, nothing is said
    assert said("bench") == "bench: 8 min to 13 min, 1.0 GiB; about 10 min left in all"
    told.ended("tune control_tuned", 1200.0, 3600.0)
    busy = "bench: 8 min to 39 min, 1.0 GiB; about 30 min left in all on this machine, which is busy (3.0 times as long)"
    assert said("bench") == busy


def test_no_estimate_ends_a_run(folder, monkeypatch, capsys):
    """Nor says anything, if it fails."""
    monkeypatch.setattr(announced, "SHORT", 0.0)
    monkeypatch.setattr(estimate.Costs, "all_stages", lambda *_: {}["a mistake"])
    recipe = read_recipe(folder / "quick.yaml")
    announced.Announced(recipe, surgery.load(folder / "base"), folder / "out", "auto").starts("locate")
    assert "locate" not in capsys.readouterr().err


def test_finished_stages_are_not_measured(base, tokenizer, folder, monkeypatch):
    """When a run is resumed; but the models are made, which it will hold."""
    costs = estimate.Costs(read_recipe(folder / "quick.yaml"), Checkpoint("base", base, tokenizer, "f" * 64), 1.0)
    rehearsed = []
    monkeypatch.setattr(costs, "_timed_step", lambda: rehearsed.append(1) or (Pace((1.0, 0.0)), 0))
    for first, left in (
        ("tune control_tuned", ["tune control_tuned", "bench", "export"]), ("bench", ["bench", "export"]),
    ):  # fmt: skip
        rehearsed.clear()
        names = [stage.name for stage in costs.all_stages(first)]
        assert [name for name in names if "control_random" not in name and "control_same" not in name] == left
        assert bool(rehearsed) is any(name.startswith("tune") for name in left)
        assert costs.held > costs.before


def test_all_gpus_of_a_process_count(monkeypatch):
    class Cuda:
        device_count = staticmethod(lambda: 2)
        max_memory_allocated = staticmethod([1300, 500].__getitem__)
        memory_allocated = staticmethod([1000, 20].__getitem__)

    monkeypatch.setattr(memory, "_cuda", lambda: Cuda)
    assert (memory._device_peak(), memory.device_held()) == (1800, 1020)


def test_a_plan_in_fewer_layers_keeps_its_heads():
    plan = Plan(sites=("L17.H3", "L40.H1,5", "L60.H2"), blend=0.1)
    assert [str(site) for site in remap_layers(plan, 4).sites] == ["L0.H3", "L1.H1,5", "L2.H2"]
    assert [str(site) for site in remap_layers(plan, 2).sites] == ["L0.H3", "L1.H1,2,5"]


@pytest.mark.slow
def test_sizes_that_no_machine_holds_are_estimated(folder):
    """From a batch that it does hold; the advice names one."""
    recipe = read_recipe(folder / "quick.yaml")
    tune = recipe.tune.model_copy(update={"batch_size": 10**9, "early_stopping": None, "gradient_checkpointing": True})
    bench = recipe.bench.model_copy(update={"limit": 10**9, "pairs": (4,), "contexts": (16,), "controls": False})
    locate = recipe.locate.model_copy(update={"batch_size": 10**9})
    recipe = recipe.model_copy(update={"tune": tune, "bench": bench, "locate": locate})
    costs = estimate.Costs(recipe, surgery.load(folder / "base"), 1.0)
    stages = {stage.name: stage for stage in costs.all_stages()}
    assert stages["tune tuned"].memory > 2**40
    assert stages["bench"].seconds > 1000
    assert "forwards" not in stages["bench"].counts
    (line,) = costs.advice([stages["tune tuned"]], 2**60)
    assert "--set tune.batch_size=" in line


def test_the_command_prints_a_table_or_json(estimated, folder, monkeypatch):
    monkeypatch.setattr(estimate, "estimate", lambda *_, **__: estimated[0])

    def printed(*options):
        monkeypatch.setattr(sys, "argv", ["surgery", "run", str(folder / "quick.yaml"), *options])
        with redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, out.getvalue()

    code, out = printed("--dry-run")
    assert code == 0
    assert all(words in " ".join(out.split()) for words in ("tune control_tuned", "in all", "Nothing was written."))
    code, out = printed("--dry-run", "--json")
    assert json.loads(out)["stages"] == json.loads(estimated[0].text())["stages"]
    assert printed("--json")[0] == 2


def test_a_dry_run_says_what_the_run_would_say_of_its_folder(estimated, folder, monkeypatch, tmp_path, capsys):
    """And what it would leave out; the folder stays as it is."""
    monkeypatch.setattr(estimate, "estimate", lambda *_, **__: estimated[0])
    with writing(tmp_path):
        Run(toolkit="0.8.0", verb="run").write(tmp_path / "run.json")
    for options, message in (
        ([], "would stop at once"), (["--resume"], "--resume skips what is finished"), (["--overwrite"], ""),
    ):  # fmt: skip
        arguments = ["surgery", "run", str(folder / "quick.yaml"), "--dry-run", "--json", "--out", str(tmp_path), *options]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        assert stop.value.code == 0
        assert json.loads(printed.out)["stages"]
        assert message in " ".join(printed.err.split())
        assert ("note:" in printed.err) is bool(message)
    assert names(tmp_path) == ["run.json"]


def test_a_study_and_a_name_are_refused(folder):
    recipe = read_recipe(folder / "quick.yaml")
    with pytest.raises(UserError, match="a study has no estimate"):
        surgery.estimate(recipe.model_copy(update={"study": {"name": "seeds"}}))
    with pytest.raises(UserError, match=r"surgery\.estimate takes a recipe"):
        surgery.estimate("recipes/demo.yaml")


@pytest.mark.parametrize(
    ("sites", "lora"),
    [
        ("[L1.H3, L2.H3, L4.H3+L4.H5, L6.H0]", "{r: 4, target_modules: [in_proj, out_proj]}"),
        pytest.param("[L7.H2]", "null", marks=pytest.mark.slow),
    ],
)
def test_all_that_is_trained_in_a_deep_model_is_counted(tmp_path, tokenizer, monkeypatch, sites, lora):
    """Two and four of eight layers are tried. The same head in several layers is as many grafts; all layers have adapters."""
    random_base(vocab_size=len(tokenizer), num_hidden_layers=8).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    sites = sites.replace("L4.H3+L4.H5", "'L4.H3,5'")
    text = f"model: {tmp_path / 'base'}\n{RECIPE}plan: {{sites: {sites}}}\n".replace("tune: {", f"tune: {{lora: {lora}, ")
    text = text.replace("exact: true", "exact: false").replace("bench: {", "bench: {controls: false, ")
    (tmp_path / "deep.yaml").write_text(text)
    recipe = read_recipe(tmp_path / "deep.yaml")
    monkeypatch.setattr(estimate, "WHOLE", 0.0)
    monkeypatch.chdir(tmp_path)
    estimated = surgery.estimate(recipe)
    assert estimated.tried == "2 and 4 of its 8 layers"
    base = surgery.load(str(tmp_path / "base"))
    hybrid = surgery.splice(base, Plan(sites=recipe.plan.sites))
    with started_run(
        hybrid, base.tokenizer, recipe.tune, data=recipe.data, seed=0, layers=None, teacher=base.model, description=""
    ) as started:  # fmt: skip
        trained = sum(p.numel() for p in started.trained.values())
    (tuned,) = (stage for stage in estimated.stages if stage.name == "tune tuned")
    assert tuned.disk == estimate.CHECKPOINTS * 3 * 4 * trained


def test_what_other_programs_take_is_no_work():
    """A machine that does other work, here one that sleeps, is slower by what its clock on the wall says."""
    watch = Stopwatch(torch.device("cpu"))
    sum(range(200_000))
    time.sleep(0.3)
    work, wall = watch.read()
    assert wall >= 0.3 > work > 0
    assert slowed(work, wall) == wall / work
    assert slowed(2.0, 1.0) == slowed(0.0, 1.0) == 1.0


@pytest.mark.usefixtures("announced")
def test_a_comparison_is_estimated_as_it_runs(folder, tmp_path, monkeypatch, capsys):
    """What its stages are, with writing that may end early; the comparison itself says it first, unless it is short."""
    spliced = splice(surgery.load(folder / "base").model, Plan(sites=("L1.H2",)))
    surgery.export(spliced, tmp_path / "hybrid", verify="tensors")
    recipe = read_recipe(folder / "quick.yaml")
    found = comparison.estimate_comparison(recipe, [str(tmp_path / "hybrid")], tmp_path / "out")
    assert [(stage.name, stage.counts["models"], stage.at_most) for stage in found.stages] == [("bench", 2, False)]
    assert found.seconds > 0
    assert found.memory <= found.available
    assert [path.name for path in tmp_path.iterdir() if path.name[0] != "."] == ["hybrid"]
    capsys.readouterr()
    for short, says in ((0.0, True), (120.0, False)):
        monkeypatch.setattr(announced, "SHORT", short)
        comparison.compare(recipe, [str(tmp_path / "hybrid")], tmp_path / f"out-{short}")
        assert ("\nbench: " in capsys.readouterr().err) is says
    long = recipe.bench.model_copy(update={"suites": ("ruler",), "contexts": (256,), "limit": 4})
    counted = benching(recipe.model_copy(update={"bench": long}), spliced, surgery.load(folder / "base").tokenizer)
    assert counted.at_most
    assert counted.longest > 100


def test_what_a_notebook_did_before_is_no_cost_of_the_next_process(monkeypatch):
    times = SimpleNamespace(user=3000.0, system=200.0)
    monkeypatch.setattr(estimate.psutil, "Process", lambda: SimpleNamespace(cpu_times=lambda: times))
    assert estimate.started() == estimate.STARTING < 60
