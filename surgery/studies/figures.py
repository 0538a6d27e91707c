"""The figures of studies: bars for every cut, curves over dictionary sizes, mixing matrices."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from surgery.locating.atlas import example, paint
from surgery.probes.kv import KVRetrieval
from surgery.records.site import Site
from surgery.runtime import plotting as plots
from surgery.statistics import Proportion
from surgery.studies.study import Findings, Subjects

PROBES = {"retrieval": "#0072B2", "knowledge": "#E69F00"}
LINES = ("#555555", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#56B4E9")


def draw_bars(findings: Findings, title: str, path: Path) -> None:
    """Draw a pair of bars for every row: accuracy on both probes, with 95% intervals."""
    with plt.rc_context(plots.STYLE):
        figure, axis = plt.subplots(figsize=(max(4.5, 1.2 + 0.8 * len(findings.rows)), 3.4))
        centres = np.arange(len(findings.rows))
        for i, (probe, color) in enumerate(PROBES.items()):
            results = [row.figures[probe] for row in findings.rows]
            heights = [result.accuracy for result in results if isinstance(result, Proportion)]
            below = [height - result.ci95[0] for height, result in zip(heights, results, strict=True)]
            above = [result.ci95[1] - height for height, result in zip(heights, results, strict=True)]
            axis.bar(centres + (i - 0.5) * 0.38, heights, 0.36, yerr=(below, above), color=color, label=probe,
                     error_kw={"lw": 0.8, "ecolor": "#333333"})  # fmt: skip
        axis.set_xticks(centres, [row.what for row in findings.rows], rotation=30, ha="right")
        axis.set(ylabel="accuracy", ylim=(0, 1.02), title=title)
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        plots.save(figure, path)


def draw_curves(findings: Findings, title: str, path: Path) -> None:
    """Draw accuracy against dictionary size: a line for every row with its 95% band, and a line for chance."""
    with plt.rc_context(plots.STYLE):
        figure, axis = plt.subplots(figsize=(6.2, 3.6))
        sizes = [int(size) for size in findings.rows[0].figures]
        for i, row in enumerate(findings.rows):
            results = [result for result in row.figures.values() if isinstance(result, Proportion)]
            color = LINES[i % len(LINES)]
            style = "--" if "random" in row.what else "-"
            accuracies = [result.accuracy for result in results]
            lower, upper = zip(*(result.ci95 for result in results), strict=True)
            axis.plot(sizes, accuracies, color=color, ls=style, marker="o", ms=3, label=row.what)
            axis.fill_between(sizes, lower, upper, color=color, alpha=0.15, lw=0)
        axis.plot(sizes, [1 / size for size in sizes], color="#bbbbbb", lw=1, ls=":", label="chance")
        axis.set(xlabel="pairs in the dictionary", ylabel="accuracy", ylim=(0, 1.02), xticks=sizes, title=title)
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        plots.save(figure, path)


def draw_matrices(findings: Findings, title: str, path: Path, subjects: Subjects, pairs: int) -> None:
    """Draw a row of panels for each model: the mixing matrices of its heads over the tokens of one dictionary."""
    checkpoints = [subjects.checkpoint, *([subjects.other] if subjects.other else [])]
    question = KVRetrieval(pairs).questions(1, subjects.recipe.seed)[0]
    columns = max(len(findings.about[checkpoint.name]) for checkpoint in checkpoints)
    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(len(checkpoints), columns, figsize=(5.0 * columns, 4.9 * len(checkpoints)), squeeze=False)
        for panels, checkpoint in zip(axes, checkpoints, strict=True):
            sites = [Site.parse(text) for text in findings.about[checkpoint.name]]
            labels, matrices = example(checkpoint.model, checkpoint.tokenizer, sites, question)
            for axis in panels[len(matrices) :]:
                axis.set_visible(False)
            for axis, (site, matrix) in zip(panels, matrices.items(), strict=False):
                prefix = f"{Path(checkpoint.name).name} {site} "
                paint(axis, matrix, labels, next(row.what for row in findings.rows if row.what.startswith(prefix)))
        figure.suptitle(f"{title}: share of each row's weight (square root)", fontsize=10)
        figure.tight_layout()
        plots.save(figure, path)
