"""The paper's studies run on the built-in models, and say what was measured."""

import pytest

from surgery.errors import UserError
from surgery.evaluation import asking
from surgery.evaluation.report import Report
from surgery.locating.ranking import Ranking
from surgery.pretraining.recipe import read_pretrain_recipe
from surgery.records.site import split_sites
from surgery.runtime.ownership.files import writing
from surgery.statistics import Proportion
from surgery.studies import Findings, cohort, make, retrieval_aware, studies
from surgery.studies.study import Row
from surgery.tuning.run import TuningRun
from tests.models import ROOT

RECIPES = sorted((ROOT / "recipes" / "paper").glob("*.yaml"))
FEW = ("--set", "locate.examples=10", "--set", "locate.options.pairs=8")
ROLES = ("--set", "locate.examples=24", "--set", "locate.layers=false")
SSM = ("--set", "locate.examples=40", "--set", "locate.options.pairs=32", "--set", "locate.exact=0.13")
MORE = {  # what a recipe needs beside that: smaller sizes, or enough examples for heads to have roles
    "crucial-heads": ROLES,
    "kv-sweep": (*ROLES, "--set", "study.pairs=[4,8]"),
    "mixing-matrices": (*ROLES, *SSM),
}


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem == "mixing-matrices")) for path in RECIPES],
)
def test_a_recipe_runs(recipe, surgery, tmp_path, painted):
    """And, of one study, is not made again."""
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    more = MORE.get(recipe.stem, ())
    status, printed, error = surgery("run", recipe, *FEW, *more, "--out", "out")
    assert status == 0, error
    findings = Findings.read(tmp_path / "out" / "findings.json")
    assert findings.study in studies()
    assert findings.summary.split("\n")[0][:40] in printed.replace("\n", "")
    assert all(0 <= figure.ci95[0] <= figure.ci95[1] <= 1 for row in findings.rows for figure in row.figures.values())
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    if recipe.stem != "minimal-model":
        return
    # Another recipe's findings are not taken for this one's.
    with writing(tmp_path / "out"):
        findings.model_copy(update={"summary": "read"}).write(tmp_path / "out" / "findings.json")
    assert "read" in surgery("run", recipe, *FEW, *more, "--out", "out", "--resume")[1]
    status, _, error = surgery("run", recipe, *FEW, *more, "--out", "out")
    assert (status, "holds an earlier run" in error) == (2, True)
    assert "read" not in surgery("run", recipe, *FEW, *more, "--set", "seed=7", "--out", "out", "--resume")[1]


def test_every_study_has_a_recipe_and_says_what_was_published():
    named = {Findings.read(path).study for path in (ROOT / "recipes" / "paper").glob("*.findings.json")}
    assert named == {name for name, study in studies().items() if study.published}
    assert all(study.title for study in studies().values())


SEEDS = """
model: checkpoints/tiny-mamba2
locate: {examples: 4, layers: false, exact: 0.1, options: {pairs: 4}}
tune: {steps: 1, batch_size: 2, text_batch_size: 1, skill_batch_size: 2, lessons: [{probe: kv, options: {pairs: 8}}]}
bench: {pairs: [4, 8], unseen_pairs: [], limit: 4, windows: 2, contexts: []}
study: {name: seeds, seeds: 2, ways: {distil: {}, gentle: {kl_weight: 4.0}}}
"""


@pytest.mark.slow  # a study of whole runs; test_a_recipe_runs is quicker
def test_seeds(surgery, tmp_path, monkeypatch):
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "seeds.yaml").write_text(SEEDS)
    assert surgery("run", "seeds.yaml", "--out", "out")[0] == 0
    findings = Findings.read(tmp_path / "out" / "findings.json")
    names = ("base", "untrained", "distil", "gentle", "no graft", "random heads")
    assert [row.what for row in findings.rows] == [f"{name}, seed {seed}" for seed in (0, 1) for name in names]
    assert all(row.figures["knowledge, change"].n == 4 for row in findings.rows if not row.what.startswith("base"))
    worst = min(row.figures["kv.8"].accuracy for row in findings.rows if row.what.startswith("distil"))
    assert "distil: KV 4 at least" in findings.summary
    assert f"KV 8 at least {worst:.3f} (" in findings.summary
    assert {*findings.about["seconds"]} == {*names} - {"base", "untrained"}
    assert "untrained: KV 4 at least" in findings.summary
    # Interrupted after the last seed was measured: nothing is measured or trained again.
    (tmp_path / "out" / "findings.json").unlink()
    monkeypatch.setattr(TuningRun, "distil", None)
    monkeypatch.setattr(asking, "answer", None)
    assert surgery("run", "seeds.yaml", "--out", "out", "--resume")[0] == 0
    again = Findings.read(tmp_path / "out" / "findings.json")
    assert (again.rows, again.about) == (findings.rows, findings.about)
    for change, complaint in {
        "study.ways={distil: {stepping: 3}}": "recipe, changed: unknown key 'tune.stepping'",
        "study.ways={base: {}}": "'base' is the name of what the ways are compared with",
        "bench.suites=[language]": "needs the suite quick",
    }.items():
        status, _, error = surgery("run", "seeds.yaml", "--set", change, "--out", "other")
        assert (status, complaint in error, (tmp_path / "other").exists()) == (2, True, False), error


HOPS = """
model: checkpoints/tiny-mamba2
locate: {examples: 4, layers: false, exact: false, options: {pairs: 4}}
plan: {sites: "L0.H3,5"}
tune: {steps: 1, batch_size: 2, text_batch_size: 1, skill_batch_size: 2, lessons: [{probe: two_hops, options: {pairs: 2}}]}
bench: {limit: 4}
study: {name: hops, one: [4], two: [2]}
"""


@pytest.mark.slow  # as test_seeds
def test_hops(surgery, tmp_path):
    """Each graft of the hybrids that are asked for is silenced by itself; the controls are not."""
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "hops.yaml").write_text(HOPS)
    status, _, error = surgery("run", "hops.yaml", "--out", "out")
    assert status == 0, error
    findings = Findings.read(tmp_path / "out" / "findings.json")
    names = [row.what for row in findings.rows if ": without " not in row.what]
    sites = findings.about["sites"]
    assert {*names} - {"base", "no graft, tuned"} == {*sites}
    assert sites["heads of one hop, tuned"] == "L0.H3,5"
    assert "L0" not in sites["random heads, tuned"]
    named = split_sites(sites["heads of one hop and of other layers, tuned"])
    grafts = [str(head) for site in named for head in site.each()]
    assert grafts[:2] == ["L0.H3", "L0.H5"]
    assert len(grafts) == 4
    silenced = [row.what.partition(": without ") for row in findings.rows[len(names) :]]
    assert [last for first, _, last in silenced if "other layers" in first] == grafts
    assert [last for first, _, last in silenced if "other layers" not in first] == grafts[:2]
    assert all({*row.figures} == {"one hop, 4 pairs", "two hops, 2 pairs"} for row in findings.rows)
    status, _, error = surgery("run", "hops.yaml", "--set", "tune.lessons=[{probe: kv, options: {pairs: 4}}]", "--out", "no")
    assert (status, "needs lessons of two hops" in error) == (2, True)


AWARE = """
model: checkpoints/tiny-llamba
locate: {examples: 4, layers: false, options: {pairs: 4}}
tune: {steps: 1, batch_size: 2, text_batch_size: 1, skill_batch_size: 2, lessons: [{probe: kv, options: {pairs: 4}}]}
bench: {pairs: [4], limit: 4, windows: 2, contexts: [], unseen_pairs: []}
study: {name: retrieval_aware, other: checkpoints/tiny-llama, heads: [2], steps: 2}
"""


@pytest.mark.slow
def test_retrieval_aware_conversion(surgery, tmp_path, monkeypatch):
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "aware.yaml").write_text(AWARE)
    status, _, error = surgery("run", "aware.yaml", "--out", "out")
    assert status == 0, error
    findings = Findings.read(tmp_path / "out" / "findings.json")
    curves = [f"2 heads {curve}" for curve in ("kept", "at random", "operated on")]
    assert [row.what for row in findings.rows] == ["converted", "the Transformer", "no head kept", *curves]
    assert findings.rows[1].figures["kv.4"].accuracy == 1.0, "the Transformer is measured as it is"
    about = findings.about
    assert about["heads for each"] == 2, "of 16 numbers, beside heads of 32"
    assert len(about["chosen"]) == 2
    assert len(about["operated"]) == 4
    assert not set(about["chosen"]) & set(about["random"])
    ranked = Ranking.read(tmp_path / "out" / "transformer" / "ranking.json").columns.sorted()
    assert [str(score.site) for score in ranked[:2]] == about["chosen"]
    # Each mixer was trained once, also where several hybrids have it, and nothing is trained or measured again.
    mixers = {path.name for path in (tmp_path / "out" / "mixers").iterdir()}
    assert {f"L{layer}-0.safetensors" for layer in range(4)} < mixers
    assert len(mixers) <= 4 + 2 * 2
    (tmp_path / "out" / "findings.json").unlink()
    monkeypatch.setattr(retrieval_aware, "align_layers", None)
    monkeypatch.setattr(TuningRun, "distil", None)
    monkeypatch.setattr(asking, "answer", None)
    assert surgery("run", "aware.yaml", "--out", "out", "--resume")[0] == 0
    again = Findings.read(tmp_path / "out" / "findings.json")
    assert (again.rows, again.about) == (findings.rows, findings.about)
    status, _, error = surgery("run", "aware.yaml", "--set", "model=checkpoints/tiny-mamba2", "--out", "other")
    assert (status, error.count("\n")) == (2, 1)


SMALL = "architecture: {num_hidden_layers: 1, hidden_size: 32, num_heads: 2}, steps: 2, examples: 4, kv_targets: 4"
COHORT = f"""
model: checkpoints/tiny-mamba2
locate: {{examples: 4, exact: true, layers: false, options: {{pairs: 4}}}}
plan: {{sites: L0.H1}}
tune: {{steps: 1, batch_size: 2, text_batch_size: 1, skill_batch_size: 2, lessons: [{{probe: kv, options: {{pairs: 4}}}}]}}
bench: {{pairs: [4], unseen_pairs: [4], limit: 6, windows: 2, contexts: [], controls: false}}
study: {{name: cohort, bases: {{one: {{{SMALL}, seed: 1}}, two: {{{SMALL}, seed: 2, curriculum: {{last: 3}}}}}}}}
"""


@pytest.fixture
def cohort_files(tmp_path):
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "cohort.yaml").write_text(COHORT)


@pytest.mark.slow
def test_cohort(surgery, tmp_path, monkeypatch, cohort_files):
    """Interrupted before the second base is trained, it goes on there, and repeats nothing; bases may be made by themselves, as
    processes do that share a folder, and joined."""
    made, own = [], cohort.pretrain

    def pretrain(recipe, out, **options):
        made.append(out.name)
        if made == ["one", "two"]:
            raise KeyboardInterrupt
        return own(recipe, out, **options)

    monkeypatch.setattr(cohort, "pretrain", pretrain)
    assert surgery("run", "cohort.yaml", "--out", "out")[0] == 130
    done = (tmp_path / "out" / "jobs" / "one" / "report.json").stat().st_mtime_ns
    status, _, error = surgery("run", "cohort.yaml", "--out", "out", "--resume", "--set", "study.only=[two]")
    assert status == 0, error
    assert [*Findings.read(tmp_path / "out" / "findings.json").about] == ["two"]
    status, table, error = surgery("run", "cohort.yaml", "--out", "out", "--resume")
    assert status == 0, error
    assert made == ["one", "two", "two"]
    assert [line.split()[0] for line in table.splitlines() if line.startswith(("one ", "two "))] == ["one", "two"]
    assert (tmp_path / "out" / "jobs" / "one" / "report.json").stat().st_mtime_ns == done
    findings = Findings.read(tmp_path / "out" / "findings.json")
    models = ("base", "spliced", "tuned")
    assert [row.what for row in findings.rows] == [f"{name}: {model}" for name in ("one", "two") for model in models]
    assert all(row.figures["kv.4"].n == 6 for row in findings.rows)
    report = Report.read(tmp_path / "out" / "jobs" / "two" / "report.json")
    assert findings.rows[5].figures["kv.4"] == report["tuned"].kv["4"]
    assert findings.rows[5].figures["unseen keys, kv.4"] == report["tuned"].tasks["kv_unseen.4"]
    assert "unseen keys " in findings.summary
    for name, last in (("one", 10), ("two", 3)):
        about = findings.about[name]
        assert about["plan"] == ["L0.H1"]
        heads = Ranking.read(tmp_path / "out" / "jobs" / name / "ranking.json").columns
        gains = dict(zip(("L0.H0", "L0.H1"), heads.values("splice_gain")[heads.head.argsort()].tolist(), strict=True))
        assert gains[about["best"]] == about["gain of the best"] == max(gains.values())
        assert gains[about["predicted"]] == about["gain of the predicted"]
        recipe = read_pretrain_recipe(tmp_path / "out" / "bases" / name / "recipe.yaml")
        assert (recipe.first_layer_steps, recipe.curriculum.last, recipe.architecture["state_size"]) == (0, last, 16)
    assert findings.summary.startswith("The predicted site is the best, or within the interval of the best, in ")
    assert " 0 retrieve: with 4 pairs the lower" in findings.summary.partition("\n")[0]
    assert "two (L0.H1), KV 4: base" in findings.summary


def test_a_base_that_cannot_be_operated_on_is_a_finding(surgery, tmp_path, cohort_files):
    auto = "least_gain: 100, max_heads: 1, candidates: 1, skill_examples: 4, windows: 2, text_bound: 1"
    job = f"{{plan: {{sites: null, heads: auto, auto: {{{auto}}}}}}}"
    more = ("--set", "study.only=[two]", "--set", f"study.bases.two.job={job}")
    status, _, error = surgery("run", "cohort.yaml", *more, "--out", "out")
    assert status == 0, error
    findings = Findings.read(tmp_path / "out" / "findings.json")
    assert [row.what for row in findings.rows] == ["two: base"]
    assert {*findings.rows[0].figures} == {"kv.4", "letters"}  # of the sizes that bench asks
    assert "no head is worth its cache" in findings.about["two"]["stopped"]
    assert "predicted" in findings.about["two"]
    assert "stopped: " in findings.summary


@pytest.mark.slow  # a base that cannot be operated on is quicker
def test_a_base_that_cannot_be_trained_is_a_finding(surgery, tmp_path, cohort_files, monkeypatch):
    own = cohort.pretrain

    def pretrain(recipe, out, **options):
        if out.name == "one":
            raise UserError("the loss is nan")
        return own(recipe, out, **options)

    monkeypatch.setattr(cohort, "pretrain", pretrain)
    status, _, error = surgery("run", "cohort.yaml", "--out", "out")
    assert status == 0, error
    findings = Findings.read(tmp_path / "out" / "findings.json")
    assert findings.about["one"] == {"stopped": "the loss is nan"}
    assert [row.what for row in findings.rows] == ["two: base", "two: spliced", "two: tuned"]
    assert "one: stopped: the loss is nan" in findings.summary
    _, body = cohort.Cohort.table(findings)
    assert [row[0] for row in body] == ["one", "two"]


def test_a_cohort_is_summed_up_where_a_job_stopped(tmp_path, painted):
    """Such a base has other sizes than the rest, and no hybrid."""
    sizes = {"able": ("kv.8", "kv.100"), "stopped": ("kv.4", "kv.8")}
    right, well = (Proportion(accuracy=accuracy, ci95=(0.8, 1.0), n=20) for accuracy in (0.9, 0.95))
    rows = [Row(what=f"{name}: base", figures=dict.fromkeys(of, right)) for name, of in sizes.items()]
    rows += [
        Row(what="able: spliced", figures=dict.fromkeys(sizes["able"], right)),
        Row(what="able: tuned", figures=dict.fromkeys(sizes["able"], well) | {"unseen keys, kv.100": right}),
        Row(what="able: control_same_layer_tuned", figures=dict.fromkeys(sizes["able"], well)),
    ]
    about = {
        "able": {"agree": True, "predicted": "L0.H1", "best": "L0.H1", "plan": ["L0.H1"]},
        "stopped": {"stopped": "no head"},
    }
    said = cohort.headline(about, rows)
    assert "in 1 of 2 bases. 2 retrieve: with 8 pairs" in said
    assert (
        "the untrained graft gains at 100 pairs in 0. Tuned, 1 reach 0.95 at 100 pairs, 0 with keys not used in tuning" in said
    )
    assert said.endswith("and 1 with grafts at random other heads of the same layer.")
    origin = Findings.read(ROOT / "recipes" / "seed2.findings.json").provenance
    found = Findings(provenance=origin, study="cohort", about=about, summary=said, rows=tuple(rows))
    _, body = cohort.Cohort.table(found)
    assert [row[:5] for row in body] == [["able", "L0.H1", "yes", "0.900", "0.900"], ["stopped", "no head", "", "", ""]]
    cohort.Cohort(bases={"able": {}}).draw(found, tmp_path / "figure.png", None)
    assert (tmp_path / "figure.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("study.bases.one.stepping=3", "study.bases.one: unknown key 'stepping'"),
        ("study.bases.two.job={plan: {headds: 2}}", "study.bases.two.job: recipe, changed: "),
        ("study.only=[]", "only: give at least one"),
        ("study.bases.two.job={locate: {exact: false}}", "set locate.exact=true (study.bases.two.job)"),
        ("study.bases.two.job={bench: {pairs: [8]}}", "by the same bench.pairs: leave them out (study.bases.two.job)"),
        ("study.bases.two.architecture={num_heads: 7}", "study.bases.two: architecture: no model can be made of this"),
        ("bench.suites=[language]", "needs the suite quick"),
    ],
)
def test_a_cohort_that_cannot_be_made_is_refused(surgery, tmp_path, cohort_files, change, complaint):
    status, _, error = surgery("run", "cohort.yaml", "--set", change, "--out", "out")
    assert (status, complaint in error, (tmp_path / "out").exists()) == (2, True, False), error


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"name": "sweeping"}, "no study is named 'sweeping'; did you mean kv_sweep"),
        ({"name": "replacement"}, "the study 'replacement': the key 'other' is missing"),
    ],
)
def test_what_does_not_exist_is_refused(options, complaint):
    with pytest.raises(UserError, match=complaint):
        make(**options)
