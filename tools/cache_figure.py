"""recipes/gain-cache.png: what retrieval gains, against the cache that it takes, from the reports of the demos: python -m
tools.redraw"""

from pathlib import Path

from surgery.evaluation.report import Report
from surgery.evaluation.results import ModelReport
from surgery.figures import plotting
from surgery.figures.plots import name_lines

RECIPES = Path(__file__).parent.parent / "recipes"
REPORTS = {"demo": "#0072B2", "demo-auto": "#E69F00", "demo-mamba1": "#D55E00"}  # and their colours
SIZE = "64"  # pairs


def points(reports: dict[str, Report]) -> tuple[int, dict[str, dict[str, tuple[float, float]]]]:
    """(the longest context that all were measured at; by report and model, KiB of the cache there and accuracy)."""
    contexts = [{cost.context for cost in model.cost} for report in reports.values() for model in report.models.values()]
    longest = max(set.intersection(*contexts))

    def point(model: ModelReport) -> tuple[float, float]:
        held = next(cost.cache_bytes for cost in model.cost if cost.context == longest)
        return held / 2**10, model.kv[SIZE].accuracy

    chosen = ("base", "control_tuned", "tuned")
    return longest, {name: {each: point(report[each]) for each in chosen} for name, report in reports.items()}


def draw(path: Path) -> None:
    """A line from each base to its tuned hybrid, and the same tuning without a graft beside the base."""
    reports = {name: Report.read(RECIPES / f"{name}.report.json") for name in REPORTS}
    context, of = points(reports)
    gains = [each["tuned"][1] - each["base"][1] for each in of.values()]
    times = [each["tuned"][0] / each["base"][0] for each in of.values()]
    with plotting.drawing(path, height=3.8, width=7.2) as (_, axes):
        axis, names = axes[0, 0], list[tuple[float, float, str, str]]()
        for (name, each), color in zip(of.items(), REPORTS.values(), strict=True):
            (x, y), (high, top) = each["base"], each["tuned"]
            axis.annotate("", (high, top), (x, y), arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.6, "shrinkB": 4})
            axis.plot(high, top, "o", ms=6, color=color)
            axis.plot(x, y, "o", ms=6, color=plotting.COLORS["base"])
            axis.plot(*each["control_tuned"], "x", ms=7, color=plotting.CHANCE)
            names.append((high, top, _label(name, reports[name]), color))
        lowest = min((each["base"] for each in of.values()), key=lambda place: place[1])
        highest = max((each["control_tuned"] for each in of.values()), key=lambda place: place[1])
        for text, place, rise in (("the bases", lowest, -12), ("tuned without\na graft (x)", highest, 14)):
            axis.annotate(text, place, (6, rise), textcoords="offset points", fontsize=9.5, color=plotting.CHANCE, va="center")
        axis.set_xscale("log")
        axis.set_xlim(min(each["base"][0] for each in of.values()) / 1.3, max(each["tuned"][0] for each in of.values()) * 1.3)
        ticks = [64, 128, 256, 512, 1024]
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.set_xticks([], minor=True)
        plotting.accuracy_axis(axis, xlabel=f"KiB of cache and state after {context:,} tokens (log scale, lower is better)")
        larger = " to ".join(dict.fromkeys(f"{each:.1f}" for each in (min(times), max(times))))
        axis.set_title(
            f"Retrieval from {SIZE} pairs rises by {min(gains):.2f} to {max(gains):.2f};\n"
            f"the cache after {context:,} tokens is {larger} times as large"
        )
        name_lines(axis, names, 0.2)


def _label(name: str, report: Report) -> str:
    """The base, and what was grafted."""
    assert report.plan is not None
    heads = sum(len(site.heads) for site in report.plan.sites)
    what = "channels" if name.endswith("mamba1") else "heads"
    way = "\nfound by measuring" if report.plan.growth is not None else ""
    return f"{report.provenance.base},\n{heads} {what}{way}"
