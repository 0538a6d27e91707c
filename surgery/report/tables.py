"""The tables of a report, as rows of text: the first row is the header, the first column names what a row is about."""

from collections.abc import Sequence

from surgery.records.report import Change, Cost, Measurement, ModelReport, Report, figure
from surgery.runtime.progress import size

Table = list[list[str]]


def short_table(report: Report) -> Table:
    """The base, the main model and its best control: what each answers, and its price."""
    columns = report.columns()
    context = f"{report.base.costs[-1].context:,} tokens" if report.base.costs else "-"
    table = [["", *(report.measurements[name].short for name in columns), f"cache at {context}", "time per token (base 1)"]]
    for row in report.rows():
        model = report.models[row]
        costs = _costs(report, model)
        cost = costs[-1] if costs else None
        price = [size(cost.cache_bytes), f"{cost.token.mean:.2f}"] if cost else ["-", "-"]
        table.append([model.description, *(figure(model.results.get(name)) for name in columns), *price])
    return table


def results_table(report: Report) -> Table:
    """Every model in every measurement, with intervals; a row for each measurement."""
    table = [["", *(model.description for model in report.models.values())]]
    for name, measurement in report.measurements.items():
        results = [model.results.get(name) for model in report.models.values()]
        cells = ["-" if r is None else f"{figure(r)} [{r.low:.3f}, {r.high:.3f}]" for r in results]
        unit = " (nats per token)" if measurement.metric == "loss" else ""
        table.append([measurement.label + unit, *cells])
    return table


def changes_table(report: Report, name: str) -> Table:
    """One model's differences to the base, and what they say."""
    table = [["", "difference", "what it says"]]
    for key, change in report.models[name].changes.items():
        measurement = report.measurements[key]
        table.append([measurement.label, str(change), describe_change(change, measurement)])
    return table


def controls_table(report: Report) -> Table:
    """What else might have done as well: each control in the main measurement, what was trained, and its cache."""
    name = report.verdict.measurement
    context = f" at {report.base.costs[-1].context:,} tokens" if report.base.costs else ""
    about = report.measurements[name].short
    table = [["", about, "difference of the main model to it", "parameters trained", f"cache{context}"]]
    for model in report.models.values():
        if model.role == "control" and model.behind is not None:
            costs = _costs(report, model)
            trained = "-" if model.trained is None else f"{model.trained:,}"
            cache = size(costs[-1].cache_bytes) if costs else "-"
            table.append([model.description, figure(model.results.get(name)), str(model.behind), trained, cache])
    return table


def costs_table(report: Report) -> Table:
    """Cache and time of the base and the hybrids at every length; controls cost what their models cost."""
    read = any(cost.reading for model in report.models.values() for cost in model.costs)
    table = [["", "tokens", "batch", "cache", "ms per token", "base 1", *(["reading, base 1"] if read else [])]]
    for model in report.models.values():
        for cost in () if model.role == "control" else model.costs:
            cells = [
                model.description,
                f"{cost.context:,}",
                str(cost.batch),
                size(cost.cache_bytes),
                f"{cost.milliseconds:.2f}",
            ]
            for ratio in (cost.token, *([cost.reading] if read else [])):
                cells.append("-" if ratio is None else f"{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]")
            table.append(cells)
    return table


def describe_change(change: Change, measurement: Measurement) -> str:
    """A difference in words: "better (p < 0.001)", "no difference seen; n = 64 shows differences of 0.012 or more"."""
    if change.shown:
        better = (change.mean < 0) == (measurement.metric == "loss")
        return f"{'better' if better else 'worse'} ({describe_p(change.p)})"
    if change.low > 0 or change.high < 0:
        return f"not shown among so many comparisons ({describe_p(change.p)}, corrected)"
    if change.detectable is None:
        return "no difference seen; too few questions to see a small one"
    unit = " nats" if measurement.metric == "loss" else ""
    return f"no difference seen; n = {change.n:,} shows differences of {change.detectable:.2g}{unit} or more"


def describe_p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def _costs(report: Report, model: ModelReport) -> Sequence[Cost]:
    """What has no grafts costs what the base costs."""
    return model.costs or (() if model.sites else report.base.costs)
