"""A cohort: the main job on toy models trained without the layer-0 curriculum, each from scratch.

For every base: is the site that splice attribution predicts the best of an exact scan of all heads? What does the graft gain
untrained and tuned, beside the controls of `surgery run`, and what does it cost? The recipe is that of the job; its model says,
by the recipe in its folder, how the bases are trained, as far as a base says nothing else. Bases are not kept but in the
study's folder, where each is a job of its own: a study that was interrupted goes on with the base at which it was.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from surgery.costs.run import run
from surgery.errors import UserError
from surgery.evaluation import markdown
from surgery.evaluation.judgement import heading
from surgery.evaluation.report import Report
from surgery.evaluation.results import ModelReport, value
from surgery.figures import plotting
from surgery.jobs.locating_stage import RANKING
from surgery.locating.ranking import Ranking
from surgery.pretraining.fresh_model import check_architecture
from surgery.pretraining.pretrain import pretrain
from surgery.pretraining.recipe import PretrainRecipe, parsed_pretrain_recipe, read_pretrain_recipe
from surgery.probes.letters import LETTERS as OPTIONS
from surgery.records.names import is_control
from surgery.records.recipe import Recipe, changed
from surgery.records.site import Site
from surgery.runtime.processes import on_main
from surgery.runtime.progress import say
from surgery.statistics import Estimate, Proportion
from surgery.studies.figures import LINES, whiskers
from surgery.studies.study import Findings, Measurements, Row, Study, Subjects

KNOWLEDGE, TEXT, LETTERS = "knowledge, change", "loss on text, change in nats", "letters"
UNSEEN = "unseen keys, kv."  # what lessons teach of their own words need not hold for others
BASE, SPLICED, TUNED = "base", "spliced", "tuned"
LIKE = "like"  # the key of a base that names a folder or a recipe other than the model's
JOB = "job"  # the key of a base that changes the job's recipe
SAME_LAYER = "control_same_layer_tuned"
WELL = 0.95  # of the questions, at the largest size: fixed
OF = ": "  # between a base and a model of it, in the name of a row
# Model -> its column in the table of all bases.
COLUMNS = {
    BASE: "base", SPLICED: "untrained", TUNED: "tuned", "control_tuned": "no graft, tuned",
    "control_lora_tuned": "adapters alone", "control_random_site_tuned": "other layer, tuned",
    SAME_LAYER: "other heads of the layer, tuned",
}  # fmt: skip
MARKS = {BASE: ("o", LINES[0]), SPLICED: ("D", "#E69F00"), TUNED: ("o", LINES[2])}


class Cohort(Study):
    """bases: name -> what its recipe for `surgery pretrain` changes; its key `like` names another folder or recipe than the
    model's to start from, and the sections architecture and curriculum are changed key by key. Its key `job` changes the job's
    own recipe, whose sections are changed key by key. Unless it says otherwise, no layer is taught retrieval before the
    others (first_layer_steps: 0). common: what the recipes of all bases change, unless a base says otherwise. only: these
    bases alone."""

    title: ClassVar[str] = "Toy models trained without the layer-0 curriculum"

    bases: dict[Annotated[str, Field(pattern=r"^\w[\w.-]*$")], dict[str, Any]] = Field(min_length=1)
    common: dict[str, Any] = {}
    only: Annotated[tuple[str, ...], Field(min_length=1)] | None = None

    def check(self, recipe: Recipe) -> None:
        if strays := [name for name in self.only or () if name not in self.bases]:
            raise UserError(f"study.only: there is no base '{strays[0]}'; there are {', '.join(self.bases)}")
        for name, base in self.pretrain_recipes(recipe.model).items():
            job, where = self.job(recipe, name), f" (study.bases.{name}.job)" if JOB in self.bases[name] else ""
            if "quick" not in job.bench.suites:
                raise UserError(f"the study 'cohort' needs the suite quick: bench.suites: [quick]{where}")
            if job.locate.exact != 1:
                raise UserError(f"the study 'cohort' scans all heads: set locate.exact=true{where}")
            if job.bench.pairs != recipe.bench.pairs:
                raise UserError(f"the study 'cohort' compares bases by the same bench.pairs: leave them out{where}")
            check_architecture(base, f"study.bases.{name}")

    def pretrain_recipes(self, model: str) -> dict[str, PretrainRecipe]:
        """How the bases are trained, where the recipe's model is `model`."""
        chosen = self.bases if self.only is None else {name: self.bases[name] for name in self.only}
        return {name: _recipe(name, self.common | changes, model) for name, changes in chosen.items()}

    def job(self, recipe: Recipe, name: str) -> Recipe:
        """What is done to a base, but for the folder in which it is."""
        changes = self.bases[name].get(JOB, {})
        if not isinstance(changes, Mapping) or {"model", "study"} & set(changes):
            raise UserError(f"study.bases.{name}.job: sections of a recipe and their settings, such as {{plan: {{heads: 2}}}}")
        try:
            return changed(recipe, **{**changes, "study": None, "tokenizer": None})
        except UserError as error:
            raise UserError(f"study.bases.{name}.job: {error}") from error

    def measure(self, subjects: Subjects) -> Measurements:
        rows: list[Row] = []
        about: dict[str, Any] = {}
        for name, recipe in self.pretrain_recipes(subjects.recipe.model).items():
            folder, out = subjects.out / "bases" / name, subjects.out / "jobs" / name
            job = self.job(subjects.recipe, name).model_copy(update={"model": str(folder)})
            try:
                _make(name, recipe, folder)
                report: Report | None = run(job, out, resume=True, anyway=True)
                stopped = ""
            except UserError as error:  # no head may be worth its cache, say; that is a finding
                report, stopped = None, str(error)
                say(f"{name}: {stopped}")
            about[name] = _about(out, report, stopped)
            sizes = job.bench.pairs
            measured = _measured(folder, sizes) if report is None else {m: _figures(of) for m, of in report.models.items()}
            rows += [Row(what=f"{name}{OF}{model}", figures=figures) for model, figures in measured.items()]
        return Measurements(about=about, summary=_summary(about, rows), rows=tuple(rows))

    @staticmethod
    def table(findings: Findings) -> tuple[list[str], list[list[str]]]:
        """One row a base: what its heads were located by (dictionaries: at the largest size), then the other skill."""
        size, largest = _target(findings.about, findings.rows), _largest(findings.rows)
        other = largest if size == LETTERS else LETTERS
        columns = [model for model in COLUMNS if any(row.what.partition(OF)[2] == model for row in findings.rows)]
        of_tuned = [f"tuned, {name}" for name in ("unseen keys", KNOWLEDGE, TEXT)]
        beside = [model for model in (BASE, TUNED, SAME_LAYER) if any(other in row.figures for row in findings.rows)]
        header = ["", "plan", "predicted is best", *(COLUMNS[model] for model in columns), *of_tuned]
        header += [f"{heading(other)}, {COLUMNS[model]}" for model in beside]
        body = []
        for name, about in findings.about.items():
            models = _of_base(findings.rows, name)
            accuracies = [f"{value(models[model][size]):.3f}" if size in models.get(model, {}) else "" for model in columns]
            tuned = models.get(TUNED, {})
            unseen = [f"{value(tuned[column]):.3f}" if (column := f"{UNSEEN}{largest[3:]}") in tuned else ""]
            costs = [f"{value(tuned[column]):+.3f}" if column in tuned else "" for column in (KNOWLEDGE, TEXT)]
            plan = about.get("stopped", "").partition(":")[0] or markdown.shortened(_planned(about))  # the summary says why
            agrees = ""
            if "agree" in about:
                as_good = f"as good as {about['best']}" if about["agree"] else f"no: {about['best']}"
                agrees = "yes" if about["predicted"] == about["best"] else as_good
            others = [f"{value(models[m][other]):.3f}" if other in models.get(m, {}) else "" for m in beside]
            body.append([name, plan, agrees, *accuracies, *unseen, *costs, *others])
        return header, body

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        """For every base a line: itself, its hybrid untrained and tuned, and the controls, at the largest size."""
        names, size = list(findings.about), _target(findings.about, findings.rows)
        with plotting.drawing(path, height=1.4 + 0.36 * len(names), width=7) as (figure, axes):
            axis = axes[0, 0]
            for place, name in enumerate(names):
                models = _of_base(findings.rows, name)
                named = {model: value(figures[size]) for model, figures in models.items() if is_control(model)}
                same_layer = [named.pop(SAME_LAYER)] if SAME_LAYER in named else []
                for controls, color, words in (
                    ([*named.values()], plotting.OTHERS, "other controls"),
                    (same_layer, plotting.COLORS[SAME_LAYER], "random heads of its layer, tuned"),
                ):
                    label = words if place == 0 else ""
                    axis.plot(controls, [place] * len(controls), "|", ms=11, mew=1.6, color=color, label=label)
                for model, (mark, color) in MARKS.items():
                    if size in models.get(model, {}):
                        result = models[model][size]
                        axis.errorbar(
                            value(result), place, xerr=whiskers([result]), fmt=mark, color=color, capsize=2.5, elinewidth=1.2,
                            label=model if place == 0 else "",
                        )  # fmt: skip
            axis.axvline(_chance(size), color=plotting.CHANCE, lw=1.2, ls=(0, (1, 2)), label="chance")
            axis.set_yticks(range(len(names)), names)
            axis.set_ylim(len(names) - 0.5, -0.5)
            axis.set(xlabel=f"{heading(size)}: {plotting.ACCURACY}", xlim=(0, 1.02))
            tuned = [value(models[TUNED][size]) for models in map(partial(_of_base, findings.rows), names) if TUNED in models]
            reach = sum(accuracy >= WELL for accuracy in tuned)
            title = f"{self.title}:\n{reach} of {len(names)} reach {WELL} at {heading(size)} when tuned"
            figure.suptitle(title, fontsize=11, fontweight="bold", ha="left", x=0.01)
            plotting.legend(figure, axis, columns=3)


def _recipe(name: str, changes: Mapping[str, Any], model: str) -> PretrainRecipe:
    """The recipe of a base."""
    like = Path(str(changes.get(LIKE, model)))
    tree = read_pretrain_recipe(like if like.is_file() else like / "recipe.yaml").model_dump(mode="json")
    tree |= {"first_layer_steps": 0, "hints": None}
    for key, change in changes.items():
        if key == "architecture" and isinstance(change, Mapping) and "model_type" in change:
            tree[key] = dict(change)
        elif key in ("architecture", "curriculum") and isinstance(change, Mapping):
            tree[key] = tree[key] | change
        elif key not in (LIKE, JOB):
            tree[key] = change
    return parsed_pretrain_recipe(tree, f"study.bases.{name}")


def _make(name: str, recipe: PretrainRecipe, folder: Path) -> None:
    """Train a base, unless it is there already. Raises UserError where its losses are not finite, say."""
    kept = folder / "recipe.yaml"
    if not on_main(lambda: kept.exists() and read_pretrain_recipe(kept) == recipe):
        say(f"training the base {name}")
        on_main(partial(pretrain, recipe, folder, overwrite=True))


def _measured(folder: Path, sizes: Sequence[int]) -> dict[str, dict[str, Proportion | Estimate]]:
    """What the base alone can do, as it was measured when it was trained: at those of `sizes` that were, and on letters. Empty
    where it could not be trained."""
    if not (folder / "measured.json").exists():
        return {}
    figures = json.loads((folder / "measured.json").read_text())
    names = [name for name in (*(f"kv.{size}" for size in sizes), LETTERS) if name in figures]
    return {BASE: {name: Proportion.model_validate(figures[name]) for name in names}}


def _figures(report: ModelReport) -> dict[str, Proportion | Estimate]:
    figures: dict[str, Proportion | Estimate] = {f"kv.{size}": accuracy for size, accuracy in report.kv.items()}
    decisions = {name: of for name, of in report.tasks.items() if isinstance(of, Proportion)}
    figures |= {UNSEEN + name.partition(".")[2]: of for name, of in decisions.items() if name.startswith("kv_unseen.")}
    figures |= {} if report.letters is None else {LETTERS: report.letters}
    for column, name in ((KNOWLEDGE, "knowledge"), (TEXT, "perplexity")):
        if name in report.change:
            figures[column] = report.change[name]
    return figures


def _about(out: Path, report: Report | None, stopped: str) -> dict[str, Any]:
    """The predicted site and the best one of all, and the plan."""
    about: dict[str, Any] = {"stopped": stopped} if stopped else {}
    if (out / RANKING).exists():
        ranking = Ranking.read(out / RANKING)
        heads = ranking.columns
        about["probe"] = ranking.probe["name"]
        # Accuracy: by loss, a head that chooses right more often but is sure of what is wrong would be worse.
        gains, predicted = heads.values("splice_gain"), int(np.nanargmax(heads.values("attribution")))
        best = int(np.nanargmax(gains))
        estimate = heads[best].splice_gain
        assert estimate is not None
        about |= {
            "predicted": str(heads.site(predicted)), "best": str(heads.site(best)),
            "gain of the predicted": float(gains[predicted]), "gain of the best": float(gains[best]),
            # Within the interval of the best, the predicted one may be as good.
            "agree": bool(predicted == best or gains[predicted] >= estimate.ci95[0]),
        }  # fmt: skip
    if report is not None and report.plan is not None:
        about["plan"] = list(map(str, report.plan.sites))
        about["gate"] = report.plan.blend
        about["training"] = report.training
    return about


def headline(about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """How many of the bases that retrieve at all the job does well on."""
    models = {name: _of_base(rows, name) for name in about}
    if _target(about, rows) == LETTERS:
        return _headline_of_letters(models)
    sizes = _sizes(rows)
    # A base on which the job stopped was measured when it was trained, at sizes of its own.
    bases = {name: each[BASE] for name, each in models.items() if BASE in each}
    smallest = next((size for size in sizes if all(size in base for base in bases.values())), sizes[0])
    largest = sizes[-1]
    surely = {name: base[smallest].ci95[0] for name, base in bases.items() if smallest in base}
    able = [name for name, low in surely.items() if low > 2 / int(smallest[3:])]
    agree = [name for name, each in about.items() if each.get("agree")]
    pairs = [{m: value(figures[largest]) for m, figures in models[name].items() if largest in figures} for name in able]
    gain = sum(each[SPLICED] > each[BASE] for each in pairs if SPLICED in each)
    well, beside = (sum(each.get(model, 0) >= WELL for each in pairs) for model in (TUNED, SAME_LAYER))
    column = f"{UNSEEN}{largest[3:]}"
    unseen = sum(value(models[name][TUNED][column]) >= WELL for name in able if column in models[name].get(TUNED, {}))
    return (
        f"The predicted site is the best, or within the interval of the best, in {len(agree)} of {len(about)} bases. "
        f"{len(able)} retrieve: with {smallest[3:]} pairs the lower end of the interval is above twice chance. Of these, the "
        f"prediction holds in {len({*agree} & {*able})}, and the untrained graft gains at {largest[3:]} pairs in {gain}. "
        f"Tuned, {well} reach {WELL:g} at {largest[3:]} pairs, {unseen} with keys not used in tuning, and {beside} with grafts "
        "at random other heads of the same layer."
    )


def _headline_of_letters(models: Mapping[str, Mapping[str, Mapping[str, Proportion | Estimate]]]) -> str:
    """How many of the bases that can do better learn to answer letters, and with which controls."""
    results = {name: {m: figures[LETTERS] for m, figures in of.items() if LETTERS in figures} for name, of in models.items()}
    weak = [of for of in results.values() if BASE in of and of[BASE].ci95[0] > _chance(LETTERS) and value(of[BASE]) < WELL]

    def well(model: str) -> int:
        return sum(model in of and value(of[model]) >= WELL for of in weak)

    return (
        f"{len(weak)} of {len(models)} bases answer letters above chance and below {WELL:g}. Of these, {well(TUNED)} reach "
        f"{WELL:g} when grafted and tuned, {well('control_tuned')} with the same tuning and no graft, "
        f"{well('control_random_site_tuned')} with grafts in another layer, and {well(SAME_LAYER)} with grafts at random other "
        "heads of the same layer."
    )


def _target(about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """What the heads were located by: letters, or dictionaries, of which the largest size counts."""
    return LETTERS if any(each.get("probe") == LETTERS for each in about.values()) else _largest(rows)


def _chance(task: str) -> float:
    return 1 / len(OPTIONS) if task == LETTERS else 1 / int(task[3:])


def _planned(about: Mapping[str, Any]) -> list[Site]:
    return [Site.parse(text) for text in about.get("plan", ())]


def _sizes(rows: Sequence[Row]) -> list[str]:
    """The names of all sizes that any row has, ascending."""
    return sorted({name for row in rows for name in row.figures if name.startswith("kv.")}, key=lambda name: int(name[3:]))


def _largest(rows: Sequence[Row]) -> str:
    """Raises UserError where no base was measured."""
    if not (sizes := _sizes(rows)):
        raise UserError("no base of the cohort was measured: none could be trained, or none retrieves")
    return sizes[-1]


def _of_base(rows: Sequence[Row], name: str) -> dict[str, dict[str, Proportion | Estimate]]:
    """Model of a base -> its figures."""
    return {row.what.partition(OF)[2]: row.figures for row in rows if row.what.partition(OF)[0] == name}


def _summary(about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Over all bases, and a line for each."""
    size, largest = _target(about, rows), _largest(rows)
    lines = [headline(about, rows)]
    for name, each in about.items():
        models = _of_base(rows, name)
        told = [f"base {value(models[BASE][size]):.3f}"] if size in models.get(BASE, {}) else []
        if "stopped" in each:
            lines.append(f"{name}: {'; '.join([*told, 'stopped: ' + each['stopped']])}")
            continue
        controls = [value(figures[size]) for model, figures in models.items() if is_control(model)]
        told += [f"{model} {value(models[model][size]):.3f}" for model in (SPLICED, TUNED)]
        told += [f"best control {max(controls):.3f}"] if controls else []
        if (unseen := f"{UNSEEN}{largest[3:]}") in models[TUNED]:
            told += [f"unseen keys {value(models[BASE][unseen]):.3f} to {value(models[TUNED][unseen]):.3f}"]
        other = largest if size == LETTERS else LETTERS
        if other in models.get(BASE, {}) and other in models[TUNED]:
            told += [f"{heading(other)} {value(models[BASE][other]):.3f} to {value(models[TUNED][other]):.3f}"]
        change = models[TUNED].get(KNOWLEDGE)
        told += [f"knowledge {value(change):+.3f}"] if change is not None else []
        lines.append(f"{name} ({markdown.shortened(_planned(each))}), {heading(size)}: {', '.join(told)}.")
    return "\n".join(lines)


STUDY = Cohort
