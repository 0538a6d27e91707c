"""The report's figures: retrieval against dictionary size, and what a token costs against context."""

from pathlib import Path

import matplotlib.pyplot as plt

from surgery import plots
from surgery.bench.report import Report


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
            if name.startswith("control"):
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
