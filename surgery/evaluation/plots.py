"""The report's figures: retrieval against dictionary size and against the number of grafted heads, and what tokens cost."""

from pathlib import Path

import matplotlib.pyplot as plt

from surgery.evaluation.markdown import dosed
from surgery.evaluation.report import Report
from surgery.runtime import plotting as plots


def draw(report: Report, folder: Path) -> None:
    """All figures that there are results for, under the names that report.md uses."""
    base = next(iter(report.models.values()))
    if base.kv:
        draw_retrieval(report, folder / "retrieval.png")
    if base.cost:
        draw_cost(report, folder / "cost.png")
    if base.speed:
        draw_speed(report, folder / "speed.png")
    if len(dosed(report)) > 1:
        draw_doses(report, folder / "dose.png")


def _style(name: str) -> dict:
    return {
        "color": plots.COLORS.get(name),
        "linestyle": "--" if name.startswith("control") else "-",
        "marker": "o",
        "markersize": 3,
    }


def draw_retrieval(report: Report, path: Path) -> None:
    """Accuracy against pairs, with 95% bands, and chance."""
    with plt.rc_context(plots.STYLE):
        figure, axis = plt.subplots(figsize=(6.2, 3.8))
        for name, model in report.models.items():
            if name.startswith("dose_"):
                continue  # a figure of their own
            sizes = sorted(map(int, model.kv))
            cells = [model.kv[str(size)] for size in sizes]
            axis.plot(sizes, [c.accuracy for c in cells], label=name.replace("_", " "), **_style(name))
            axis.fill_between(
                sizes, [c.ci95[0] for c in cells], [c.ci95[1] for c in cells], color=plots.COLORS.get(name), alpha=0.15, lw=0
            )
        axis.plot(sizes, [1 / size for size in sizes], color="#bbbbbb", lw=1, ls=":", label="chance")
        axis.set(xlabel="pairs in the dictionary", ylabel="accuracy", ylim=(0, 1.02), xticks=sizes,
                 title=f"Key-value retrieval, n = {cells[0].n} a point, 95% intervals")  # fmt: skip
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        plots.save(figure, path)


def draw_cost(report: Report, path: Path) -> None:
    """Decoding time and cache bytes against context."""
    with plt.rc_context(plots.STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.2, 3.1))
        for name, model in report.models.items():
            if name.startswith(("control", "dose_")):
                continue  # a control costs what its model costs
            contexts = [cost.context for cost in model.cost]
            left.plot(contexts, [cost.milliseconds for cost in model.cost], label=name, **_style(name))
            right.plot(contexts, [cost.cache_bytes / 2**20 for cost in model.cost], label=name, **_style(name))
        left.set(xlabel="tokens of context", ylabel="ms per decoded token", title="Decoding, batch 1")
        right.set(xlabel="tokens of context", ylabel="MiB", title="Cache")
        left.set_ylim(bottom=0)
        right.set_ylim(bottom=0)
        left.legend()
        figure.tight_layout()
        plots.save(figure, path)


def draw_speed(report: Report, path: Path) -> None:
    """Prefill, decoding and memory against context; the largest batch."""
    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(11, 3.1))
        batch = next(iter(report.models.values())).speed[-1].batch
        for name, model in report.models.items():
            if name.startswith(("control", "dose_")):
                continue
            cells = [cell for cell in model.speed if cell.batch == batch]
            contexts = [cell.context for cell in cells]
            axes[0].plot(contexts, [cell.prefill_milliseconds for cell in cells], label=name, **_style(name))
            axes[1].plot(contexts, [cell.decode_milliseconds for cell in cells], label=name, **_style(name))
            axes[2].plot(contexts, [cell.peak_bytes / 2**20 for cell in cells], label=name, **_style(name))
        titles = {"Prefill": "ms", "One more token": "ms", "Memory of the prefill": "MiB"}
        for axis, (title, unit) in zip(axes, titles.items(), strict=True):
            axis.set(xlabel="tokens of context", ylabel=unit, title=f"{title}, batch {batch}")
            axis.set_ylim(bottom=0)
        axes[0].legend()
        figure.tight_layout()
        plots.save(figure, path)


def draw_doses(report: Report, path: Path) -> None:
    """Accuracy against the number of grafted heads, one line a dictionary size, with 95% intervals."""
    doses = dict(sorted(dosed(report).items()))
    with plt.rc_context(plots.STYLE):
        figure, axis = plt.subplots(figsize=(5.2, 3.4))
        for size in next(iter(doses.values())).kv:
            cells = [model.kv[size] for model in doses.values()]
            low = [cell.accuracy - cell.ci95[0] for cell in cells]
            high = [cell.ci95[1] - cell.accuracy for cell in cells]
            axis.errorbar(list(doses), [cell.accuracy for cell in cells], yerr=(low, high), marker="o", markersize=3, capsize=2,
                          label=f"{size} pairs")  # fmt: skip
        axis.set(xlabel="grafted heads", ylabel="accuracy", ylim=(0, 1.02), xticks=list(doses), title="Dose and response")
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        plots.save(figure, path)
