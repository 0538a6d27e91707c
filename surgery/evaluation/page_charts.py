"""Which charts report.html draws, and of which numbers: retrieval, dose and response, speed and memory."""

from collections.abc import Callable

from surgery.evaluation.chance import chance
from surgery.evaluation.charts import Chart, Look, Point, Series, chart
from surgery.evaluation.comparisons import count, result_text
from surgery.evaluation.judgement import UNSEEN
from surgery.evaluation.report import HITS, NEEDLES, OTHERS, ModelReport, Perplexity, Report, is_loss, value
from surgery.records.names import is_control
from surgery.runtime import plotting
from surgery.statistics import Estimate, Proportion


def retrieval_charts(report: Report, look: dict[str, Look]) -> list[Chart]:
    """Accuracy over size, for every probe that was asked in several sizes; the needle at each depth; the losses of the suite
    hits over the length of rows."""
    families: dict[tuple[str, str], dict[str, str]] = {}
    for task in next(iter(report.models.values())).results():
        family, _, rest = task.partition(".")
        size, _, depth = rest.partition(".")
        if size.isdigit():
            families.setdefault((family, depth), {})[task] = size
    charts = []
    for (family, depth), sizes in families.items():
        if family == UNSEEN and len(sizes) == 1:
            continue  # it has its column in the table
        series = []
        for name, style in look.items():
            results = report.models[name].results()
            points = tuple(_point(float(size), results[task]) for task, size in sizes.items() if task in results)
            series.append(Series(name, style, points))
        title, unit, label = _labels(family, depth)
        guesses = [(float(size), guess) for task, size in sizes.items() if (guess := chance(task)) is not None]
        lines = [sorted(guesses)] if guesses else []
        quantity, top = (plotting.lower("nats per token"), None) if is_loss(family) else (plotting.ACCURACY, 1.0)
        charts.append(chart(title, label, quantity, series, unit=unit, top=top, chance=lines))
    return charts


def cost_charts(report: Report, look: dict[str, Look]) -> list[Chart]:
    """Time and memory against context. A control costs what its model costs and is left out."""
    first = next(iter(report.models.values()))
    models = {name: report.models[name] for name in look if not is_control(name)}

    def drawn(title: str, unit: str, points: Callable[[ModelReport], list[tuple[int, float]]]) -> Chart:
        series = [
            Series(name, look[name], tuple(Point(x, y, f"{y:,.3g} {unit}") for x, y in points(model)))
            for name, model in models.items()
        ]
        return chart(title, "tokens of context", plotting.lower(unit), series, unit="tokens")

    def of_batch(title: str, unit: str, field: str, scale: int, batch: int) -> Chart:
        def cells(model: ModelReport) -> list[tuple[int, float]]:
            return [(cell.context, getattr(cell, field) / scale) for cell in model.speed if cell.batch == batch]

        return drawn(f"{title}, batch {batch}", unit, cells)

    charts = []
    if first.cost:
        charts += [
            drawn("One more token, batch 1", "ms", lambda m: [(c.context, c.milliseconds) for c in m.cost]),
            drawn("Cache, batch 1", "MiB", lambda m: [(c.context, c.cache_bytes / 2**20) for c in m.cost]),
        ]
    for batch in sorted({cell.batch for cell in first.speed}):
        charts += [
            of_batch("Prefill", "ms", "prefill_milliseconds", 1, batch),
            of_batch("One more token", "ms", "decode_milliseconds", 1, batch),
            of_batch("Memory of the prefill", "MiB", "peak_bytes", 2**20, batch),
        ]
    return charts


def _labels(family: str, depth: str) -> tuple[str, str, str]:
    """Title, unit of a size, and the label of the axis."""
    if family in ("kv", UNSEEN):
        unseen = ", keys that no lesson holds" if family == UNSEEN else ""
        return f"Key-value retrieval{unseen}", "pairs", "pairs in the dictionary"
    if family in (HITS, OTHERS):
        return f"Loss on {family.replace('_', ' ')} of text", "tokens", "tokens of a row"
    unit = "tokens" if family in ("needle", *NEEDLES) else "size"
    return family.replace("_", " ") + (f" at depth {depth}%" if depth else ""), unit, unit


def _point(x: float, result: Proportion | Estimate | Perplexity) -> Point:
    low, high = (result.loss if isinstance(result, Perplexity) else result).ci95
    return Point(x, value(result), f"{result_text(result)}, n = {count(result):,}", low, high)
