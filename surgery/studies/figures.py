"""The figures of studies: bars for every cut, curves over dictionary sizes, points for every seed, mixing matrices."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from surgery.errors import UserError
from surgery.evaluation.results import value
from surgery.figures import plotting
from surgery.figures.chance import chance
from surgery.figures.example import example_matrices, example_tokens, window
from surgery.figures.mixing_figure import Strips, draw_strips, shares
from surgery.locating.subject import Subject
from surgery.probes import make
from surgery.probes.knowledge import Knowledge
from surgery.probes.kv import KVRetrieval
from surgery.probes.question import Question
from surgery.records.site import Site
from surgery.statistics import Estimate, Proportion
from surgery.studies.study import Findings, Subjects

PROBES = {"retrieval": "#0072B2", "knowledge": "#E69F00"}
LINES = ("#24292F", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#56B4E9")
AT_RANDOM = "at random"  # in the name of a row that is a control


def draw_bars(findings: Findings, title: str, path: Path) -> None:
    """Draw a pair of bars for every row: accuracy on both probes, with 95% intervals, and dotted what guessing gives."""
    rows = findings.rows
    labels = [textwrap.fill(row.what, 24) for row in rows]
    with plotting.drawing(path, height=1.5 + 0.62 * len(rows)) as (figure, axes):
        axis = axes[0, 0]
        centres = np.arange(len(rows))
        for i, (probe, color) in enumerate(PROBES.items()):
            results = [row.figures[probe] for row in rows]
            lengths = [value(result) for result in results]
            axis.barh(centres + (i - 0.5) * 0.38, lengths, 0.36, xerr=whiskers(results), color=color, label=probe,
                      error_kw={"lw": 1, "ecolor": "#24292F", "capsize": 2})  # fmt: skip
        for probe, guess in _guesses(findings).items():
            axis.axvline(guess, color=PROBES[probe], lw=1.6, ls=(0, (1, 1.5)), label=f"chance, {probe}")
        axis.set_yticks(centres, labels)
        axis.invert_yaxis()
        axis.set(xlabel=plotting.ACCURACY, xlim=(0, 1.02))
        _headline(figure, title)
        plotting.legend(figure, axis, columns=2)


def whiskers(results: Sequence[Proportion | Estimate]) -> list[list[float]]:
    """How far the 95% intervals reach below and above the values, as matplotlib takes it."""
    return [[value(each) - each.ci95[0] for each in results], [each.ci95[1] - value(each) for each in results]]


def retrieved(findings: Findings) -> list[float]:
    """The accuracy of retrieval of every row."""
    return [value(row.figures["retrieval"]) for row in findings.rows]


def draw_curves(findings: Findings, title: str, path: Path) -> None:
    """Draw accuracy against dictionary size: a line for every row with its 95% intervals, one band for the heads at random, and
    chance."""
    sizes = [int(size) for size in findings.rows[0].figures]
    curves = {row.what: [row.figures[str(size)] for size in sizes] for row in findings.rows}
    controls = [[value(result) for result in results] for name, results in curves.items() if AT_RANDOM in name]
    with plotting.drawing(path, height=4.2) as (figure, axes):
        axis = axes[0, 0]
        drawn = {name: results for name, results in curves.items() if AT_RANDOM not in name}
        for color, (name, results) in zip(LINES * len(drawn), drawn.items(), strict=False):
            intervals = [result.ci95 for result in results]
            plotting.draw_line(axis, sizes, [value(result) for result in results], intervals, color=color, label=name)
        if controls:
            plotting.draw_controls(axis, sizes, controls, f"{len(controls)} draws of random heads")
        plotting.draw_chance(axis, sizes, [chance(f"kv.{size}") or 0.0 for size in sizes])
        plotting.accuracy_axis(axis, xlabel="pairs in the dictionary", xticks=sizes)
        _headline(figure, title)
        plotting.legend(figure, axis, columns=2)


def draw_seeds(
    models: Mapping[str, Sequence[Mapping[str, Proportion | Estimate]]],
    labels: Mapping[str, str],
    title: str,
    path: Path,
    *,
    control: str,
    colors: Mapping[str, str],
) -> None:
    """Draw a panel for every column: for each model a point a seed, side by side, with its 95% interval. Behind them lies the
    band of the model `control`, from its lowest to its highest seed. models: of each, the columns seed by seed. labels: column
    -> the label of its axis; of an accuracy also chance is drawn. colors: of models; others have one of their own."""
    spare = iter(("#CC79A7", "#56B4E9", "#8C564B", "#B8A800") * len(models))
    colors = {name: colors.get(name) or next(spare) for name in models}
    rows = -(-len(labels) // 2)
    with plotting.drawing(path, rows, 2, width=6.4, height=0.5 + 3.1 * rows) as (figure, axes):
        for axis in axes.flat[len(labels) :]:
            axis.set_visible(False)
        for axis, (column, label) in zip(axes.flat, labels.items(), strict=False):
            names = [name for name in models if column in models[name][0]]
            for place, name in enumerate(names):
                _draw_points(axis, place, colors[name], [figures[column] for figures in models[name]])
            if control in names:
                values = [value(figures[column]) for figures in models[control]]
                plotting.draw_controls(axis, [-0.5, len(names) - 0.5], [[each, each] for each in values])
            axis.set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor", fontsize=9)
            axis.set_title(column.partition(",")[0].replace("kv.", "KV "))
            axis.set_ylabel(label, fontsize=9.5)
            axis.set_xlim(-0.5, len(names) - 0.5)
            if label == plotting.ACCURACY:
                axis.set_ylim(0, 1.02)
                if (guess := chance(column)) is not None:
                    plotting.draw_chance(axis, [-0.5, len(names) - 0.5], [guess, guess])
            else:
                axis.axhline(0, color=plotting.CHANCE, lw=1)
        _headline(figure, title)
        figure.supxlabel(f"a point a seed, 95% intervals; grey: from the lowest to the highest seed of {control}", fontsize=9)


def draw_matrices(findings: Findings, path: Path, subjects: Subjects, pairs: int) -> None:
    """Draw for each model the mixing matrices of its heads over one dictionary: what the ends of pairs and the last token draw
    on."""
    checkpoints = [subjects.checkpoint, *([subjects.other] if subjects.other else [])]
    question = KVRetrieval(pairs).questions(1, subjects.recipe.seed)[0]
    groups = []
    for checkpoint in checkpoints:
        sites = [Site.parse(text) for text in findings.about[checkpoint.name]]
        ids, tokens, spans, answer = example_tokens(checkpoint.tokenizer, question)
        panels = []
        for site, matrix in example_matrices(Subject.of(checkpoint), ids, sites).items():
            prefix = f"{Path(checkpoint.name).name} {site} "
            name = next(row.what for row in findings.rows if row.what.startswith(prefix))
            share = shares(matrix)
            panels.append((name, float(share[-1, list(answer)].sum()), share))
        groups.append(Strips(tokens, window(tokens, spans, answer), panels))
    draw_strips(groups, path)


def _draw_points(axis: Any, place: int, color: str, results: Sequence[Proportion | Estimate]) -> None:
    for i, result in enumerate(results):
        x = place + (i - (len(results) - 1) / 2) * 0.6 / len(results)
        axis.errorbar(x, value(result), whiskers([result]), fmt="o", ms=3.5, lw=1, color=color)


def _guesses(findings: Findings) -> dict[str, float]:
    """By probe what guessing gives, where its questions can be made from the recipe alone."""
    recipe, guesses = findings.provenance.recipe or {}, {}
    for probe in PROBES:
        try:
            questions = _questions(probe, recipe)
        except UserError:  # a probe that needs the tokenizer, or facts of a file that is not here
            continue
        guesses[probe] = float(np.mean([1 / len(question.choices) for question in questions]))
    return guesses


def _questions(probe: str, recipe: Mapping[str, Any]) -> list[Question]:
    if probe == "knowledge":
        return Knowledge(recipe["data"]["facts"]).questions(100, seed=0)
    probe_of_recipe = make(recipe["locate"]["probe"], **recipe["locate"]["options"])
    return probe_of_recipe.questions(100, seed=0)  # type: ignore[union-attr]  # what locates is a probe of questions


def _headline(figure: Any, title: str) -> None:
    figure.suptitle(textwrap.fill(title, 62), fontsize=11, fontweight="bold", ha="left", x=0.01)
