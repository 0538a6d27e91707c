"""The figures of studies: bars by cut, curves by dictionary size, mixing matrices."""

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
    """Accuracy on both probes, a pair of bars for every row, with 95% intervals."""
    with plt.rc_context(plots.STYLE):
        figure, axis = plt.subplots(figsize=(max(4.5, 1.2 + 0.8 * len(findings.rows)), 3.4))
        places = np.arange(len(findings.rows))
        for i, (probe, color) in enumerate(PROBES.items()):
            found = [row.figures[probe] for row in findings.rows]
            heights = [one.accuracy for one in found if isinstance(one, Proportion)]
            below = [h - one.ci95[0] for h, one in zip(heights, found, strict=True)]
            above = [one.ci95[1] - h for h, one in zip(heights, found, strict=True)]
            axis.bar(places + (i - 0.5) * 0.38, heights, 0.36, yerr=(below, above), color=color, label=probe,
                     error_kw={"lw": 0.8, "ecolor": "#333333"})  # fmt: skip
        axis.set_xticks(places, [row.what for row in findings.rows], rotation=30, ha="right")
        axis.set(ylabel="accuracy", ylim=(0, 1.02), title=title)
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        plots.save(figure, path)


def draw_curves(findings: Findings, title: str, path: Path) -> None:
    """Accuracy against dictionary size, a line for every row, with 95% bands, and chance."""
    with plt.rc_context(plots.STYLE):
        figure, axis = plt.subplots(figsize=(6.2, 3.6))
        sizes = [int(size) for size in findings.rows[0].figures]
        for i, row in enumerate(findings.rows):
            found = [one for one in row.figures.values() if isinstance(one, Proportion)]
            color = LINES[i % len(LINES)]
            style = "--" if "random" in row.what else "-"
            axis.plot(sizes, [one.accuracy for one in found], color=color, ls=style, marker="o", ms=3, label=row.what)
            axis.fill_between(sizes, [f.ci95[0] for f in found], [f.ci95[1] for f in found], color=color, alpha=0.15, lw=0)
        axis.plot(sizes, [1 / size for size in sizes], color="#bbbbbb", lw=1, ls=":", label="chance")
        axis.set(xlabel="pairs in the dictionary", ylabel="accuracy", ylim=(0, 1.02), xticks=sizes, title=title)
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        plots.save(figure, path)


def draw_matrices(findings: Findings, title: str, path: Path, subjects: Subjects, pairs: int) -> None:
    """A row of panels for each model: its heads' mixing matrices over one dictionary's tokens."""
    checkpoints = [one for one in (subjects.checkpoint, subjects.other) if one is not None]
    question = KVRetrieval(pairs).questions(1, subjects.recipe.seed)[0]
    columns = max(len(findings.about[checkpoint.name]) for checkpoint in checkpoints)
    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(len(checkpoints), columns, figsize=(5.0 * columns, 4.9 * len(checkpoints)), squeeze=False)
        for line, checkpoint in zip(axes, checkpoints, strict=True):
            sites = [Site.parse(text) for text in findings.about[checkpoint.name]]
            labels, matrices = example(checkpoint.model, checkpoint.tokenizer, sites, question)
            for axis in line[len(matrices) :]:
                axis.set_visible(False)
            for axis, (site, matrix) in zip(line, matrices.items(), strict=False):
                row = next(row.what for row in findings.rows if row.what.startswith(f"{Path(checkpoint.name).name} {site} "))
                paint(axis, matrix, labels, row)
        figure.suptitle(f"{title}: share of each row's weight (square root)", fontsize=10)
        figure.tight_layout()
        plots.save(figure, path)
