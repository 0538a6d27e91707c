"""Figures of lines: which ones a report has, and of which numbers (retrieval, losses, speed and memory)."""

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from surgery.evaluation.judgement import UNSEEN
from surgery.evaluation.results import HITS, MIDDLE, NEEDLES, OTHERS, ModelReport, Perplexity, Results, count, is_loss, value
from surgery.evaluation.suites import families
from surgery.evaluation.views import MeasuredModels
from surgery.figures import plotting
from surgery.figures.chance import chance
from surgery.figures.comparisons import result_text
from surgery.figures.lines import Figure, Look, Point, Series, looks
from surgery.figures.plots import draw_lines
from surgery.records.names import is_control
from surgery.records.plan import Plan
from surgery.statistics import Estimate, Proportion

FILES = {
    "measured": ["retrieval.png", "hits.png", "lengths.png", "cost.png", "speed.png"],
    "exported": ["retrieval.png"],
}


def measured(what: MeasuredModels, out: Path) -> None:
    """One file for each kind of numbers that were measured."""
    draw(what.report, out)


def exported(_hybrid: PreTrainedModel, _plan: Plan | None, report: Results | None, out: Path) -> None:
    """retrieval.png, for the card."""
    if report is not None:
        draw(report, out, "retrieval.png")


def draw(report: Results, folder: Path, only: str = "") -> None:
    """Draw the files. only: one of them."""
    look = looks(list(report.models))
    figures = retrieval_figures(report, look)
    timed = cost_figures(report, look)
    first = report.base
    files = {
        "retrieval.png": [figures[key] for key in figures if key == ("kv", "")],
        "hits.png": [figures[key] for key in figures if key[0] in (HITS, OTHERS)],
        "lengths.png": [
            figure for (family, depth), figure in figures.items()
            if (family in NEEDLES or (family == "needle" and depth == str(MIDDLE))) and len(figure.xs) > 1
        ],
        **pictures(figures),
        "cost.png": timed[: 2 if first.cost else 0],
        "speed.png": timed[-3:] if first.speed else [],  # the largest batch
    }  # fmt: skip
    for name, drawn in files.items():
        if drawn and only in ("", name):
            draw_lines(drawn, folder / name)


def retrieval_figures(report: Results, look: dict[str, Look]) -> dict[tuple[str, str], Figure]:
    """By (family of tasks, depth): accuracy over size, for every probe that was asked in several sizes; the needle at each
    depth; the losses of the suite hits over the length of rows."""
    families: dict[tuple[str, str], dict[str, str]] = {}
    for task in report.base.results():
        family, _, rest = task.partition(".")
        size, _, depth = rest.partition(".")
        if size.isdigit():
            families.setdefault((family, depth), {})[task] = size
    figures = {}
    for (family, depth), sizes in families.items():
        if family == UNSEEN and len(sizes) == 1:
            continue  # it has its column in the table
        series = []
        for name, style in look.items():
            results = report.models[name].results()
            points = [_point(float(size), results[task]) for task, size in sizes.items() if task in results]
            if points:
                series.append(Series(name, style, tuple(sorted(points, key=lambda point: point.x))))
        title, unit, label = _labels(family, depth)
        guesses = tuple(sorted((float(size), guess) for task, size in sizes.items() if (guess := chance(task)) is not None))
        quantity, top = (plotting.lower("nats per token"), None) if is_loss(family) else (plotting.ACCURACY, 1.0)
        figures[family, depth] = Figure(
            title, label, unit, quantity, tuple(series), top=top, chance=guesses, falls=is_loss(family),
            from_zero=not is_loss(family),
        )  # fmt: skip
    return figures


def pictures(figures: dict[tuple[str, str], Figure]) -> dict[str, list[Figure]]:
    """By the file that holds them, those of retrieval_figures that suites draw together, and that have several lengths."""
    together: dict[str, list[Figure]] = {}
    for (family, _), figure in figures.items():
        shown = families().get(family)
        if shown is not None and shown.picture is not None and len(figure.xs) > 1:
            together.setdefault(shown.picture[0], []).append(figure)
    return together


def cost_figures(report: Results, look: dict[str, Look]) -> list[Figure]:
    """Time and memory against context. Models with the same graft are the same computation, and one line: its points are their
    means, its whiskers reach from the lowest to the highest. A control costs what its model costs and is left out."""
    first = report.base
    alike: dict[str, list[str]] = {}
    for name, model in report.models.items():
        if not is_control(name):
            graft = model.plan.model_dump_json(include={"kind", "sites", "windows", "width"}) if model.plan else name
            alike.setdefault(graft, []).append(name)

    def drawn(title: str, unit: str, points: Callable[[ModelReport], list[tuple[int, float]]]) -> Figure:
        series = []
        for names in alike.values():
            values: dict[int, list[float]] = {}
            for name in names:
                for x, y in points(report.models[name]):
                    values.setdefault(x, []).append(y)
            line = tuple(_spread(x, each, unit) for x, each in sorted(values.items()))
            series.append(Series(" and ".join(names), look[names[-1]], line))
        return Figure(
            title, "tokens of context", "tokens", plotting.lower(unit), tuple(series), f"{{:,.3g}} {unit}", falls=True
        )

    def of_batch(title: str, unit: str, field: str, scale: int, batch: int) -> Figure:
        def cells(model: ModelReport) -> list[tuple[int, float]]:
            return [(cell.context, getattr(cell, field) / scale) for cell in model.speed if cell.batch == batch]

        return drawn(f"{title}, batch {batch}", unit, cells)

    figures = []
    if first.cost:
        figures += [
            drawn("One more token, batch 1", "ms", lambda m: [(c.context, c.milliseconds) for c in m.cost]),
            drawn("Cache, batch 1", "MiB", lambda m: [(c.context, c.cache_bytes / 2**20) for c in m.cost]),
        ]
    for batch in sorted({cell.batch for cell in first.speed}):
        figures += [
            of_batch("Prefill", "ms", "prefill_milliseconds", 1, batch),
            of_batch("One more token", "ms", "decode_milliseconds", 1, batch),
            of_batch("Memory of the prefill", "MiB", "peak_bytes", 2**20, batch),
        ]
    return figures


def _spread(x: int, values: list[float], unit: str) -> Point:
    low, high, middle = min(values), max(values), sum(values) / len(values)
    if low == high:
        return Point(x, middle, f"{middle:,.3g} {unit}")
    return Point(x, middle, f"{middle:,.3g} {unit} ({low:,.3g} to {high:,.3g})", low, high)


def _labels(family: str, depth: str) -> tuple[str, str, str]:
    """Title, unit of a size, and the label of the axis."""
    if (shown := families().get(f"{family}.{depth}" if depth else family)) is not None:
        return shown.title, shown.unit, shown.axis
    unit = "tokens" if family == "needle" else "size"
    return family.replace("_", " ") + (f" at depth {depth}%" if depth else ""), unit, unit


def _point(x: float, result: Proportion | Estimate | Perplexity) -> Point:
    low, high = (result.loss if isinstance(result, Perplexity) else result).ci95
    return Point(x, value(result), f"{result_text(result)}, n = {count(result):,}", low, high)
