"""The report's figures: retrieval against dictionary size, the length of a prompt and the number of grafted heads, losses on
recall hits, and what tokens cost."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from surgery.evaluation.chance import chance
from surgery.evaluation.charts import looks
from surgery.evaluation.markdown import needles
from surgery.evaluation.report import HITS, OTHERS, ModelReport, Report, value
from surgery.records.names import is_control
from surgery.runtime import plotting


def draw(report: Report, folder: Path) -> None:
    """All figures that there are results for, under the names that report.md uses."""
    base = next(iter(report.models.values()))
    if base.kv:
        draw_retrieval(report, folder / "retrieval.png")
    if base.cost:
        draw_cost(report, folder / "cost.png")
    if base.speed:
        draw_speed(report, folder / "speed.png")
    if any(task.startswith(f"{HITS}.") for task in base.tasks):
        draw_hits(report, folder / "hits.png")
    if needles(report):
        draw_lengths(report, folder / "lengths.png")


def draw_retrieval(report: Report, path: Path) -> None:
    """Accuracy against pairs: a line for the base and every hybrid, with 95% intervals; one band for all controls; chance."""
    styles = _styles(report)
    sizes = sorted(map(int, next(iter(report.models.values())).kv))
    n = next(iter(report.models.values())).kv[str(sizes[0])].n
    controls = [model for name, model in report.models.items() if is_control(name)]
    with plotting.drawing(path, height=4.0) as (figure, axes):
        axis = axes[0, 0]
        for name, style in styles.items():
            cells = [report.models[name].kv[str(size)] for size in sizes]
            plotting.draw_line(axis, sizes, [cell.accuracy for cell in cells], [cell.ci95 for cell in cells], **style)
        if controls:
            plotting.draw_controls(axis, sizes, [[model.kv[str(size)].accuracy for size in sizes] for model in controls])
        plotting.draw_chance(axis, sizes, [1 / size for size in sizes])
        plotting.accuracy_axis(axis, xlabel="pairs in the dictionary", xticks=sizes)
        axis.set_title(f"Key-value retrieval, n = {n} a point, 95% intervals")
        plotting.legend(figure, axis)


def draw_lengths(report: Report, path: Path) -> None:
    """Accuracy on needles against the length of the prompt, with 95% intervals; one band for all controls; chance."""
    panels = needles(report)
    with plotting.drawing(path, len(panels), height=0.6 + 2.4 * len(panels), sharex=True) as (figure, axes):
        for axis, (title, tasks) in zip(axes[:, 0], panels.items(), strict=True):
            _draw_tasks(axis, report, tasks)
            plotting.draw_chance(axis, list(tasks), [chance(task) or 0.0 for task in tasks.values()])
            plotting.accuracy_axis(axis, title=title)
        axes[-1, 0].set_xlabel("tokens of the prompt")
        plotting.legend(figure, axes[0, 0])


def draw_hits(report: Report, path: Path) -> None:
    """Loss on recall hits, and on other tokens, against the length of rows, with 95% intervals; one band for all controls."""
    base = next(iter(report.models.values()))
    lengths = sorted(int(task.partition(".")[2]) for task in base.tasks if task.startswith(f"{HITS}."))
    with plotting.drawing(path, 2, height=5.5, sharex=True) as (figure, axes):
        for axis, family in zip(axes[:, 0], (HITS, OTHERS), strict=True):
            _draw_tasks(axis, report, {length: f"{family}.{length}" for length in lengths})
            axis.set(ylabel=plotting.lower("nats per token"), title=f"Loss on {family.replace('_', ' ')}")
        axes[-1, 0].set_xlabel("tokens of a row")
        plotting.legend(figure, axes[0, 0])


def _draw_tasks(axis: Any, report: Report, tasks: dict[int, str]) -> None:
    """What all models have at the task of each length: a line each, and one band for all controls."""

    cells: dict[str, list[Any]] = {
        name: [model.tasks[task] for task in tasks.values()] for name, model in report.models.items()
    }
    for name, style in _styles(report).items():
        plotting.draw_line(axis, list(tasks), [*map(value, cells[name])], [cell.ci95 for cell in cells[name]], **style)
    if controls := [[*map(value, of)] for name, of in cells.items() if is_control(name)]:
        plotting.draw_controls(axis, list(tasks), controls)
    axis.set_xscale("log")
    axis.set_xticks(list(tasks), [f"{length:,}" for length in tasks], minor=False)
    axis.set_xticks([], minor=True)


def draw_cost(report: Report, path: Path) -> None:
    """Decoding time and cache bytes against context."""

    def cells(model: ModelReport) -> Sequence[Any]:
        return model.cost

    panels = {
        "One more token, batch 1": ("ms", "milliseconds", 1),
        "Cache, batch 1": ("MiB", "cache_bytes", 2**20),
    }
    _draw_costs(report, path, panels, cells)


def draw_speed(report: Report, path: Path) -> None:
    """Prefill, decoding and memory against context; the largest batch."""
    batch = next(iter(report.models.values())).speed[-1].batch

    def cells(model: ModelReport) -> Sequence[Any]:
        return [cell for cell in model.speed if cell.batch == batch]

    panels = {
        f"Prefill, batch {batch}": ("ms", "prefill_milliseconds", 1),
        f"One more token, batch {batch}": ("ms", "decode_milliseconds", 1),
        f"Memory of the prefill, batch {batch}": ("MiB", "peak_bytes", 2**20),
    }
    _draw_costs(report, path, panels, cells)


def _draw_costs(
    report: Report, path: Path, panels: dict[str, tuple[str, str, int]], cells_of: Callable[[ModelReport], Sequence[Any]]
) -> None:
    """panels: title -> unit, field of a cell, and what the field is divided by. A control costs what its model costs."""
    styles = _styles(report)
    with plotting.drawing(path, len(panels), height=0.5 + 2.1 * len(panels), sharex=True) as (figure, axes):
        for axis, (title, (unit, field, scale)) in zip(axes[:, 0], panels.items(), strict=True):
            for name, style in styles.items():
                cells = cells_of(report.models[name])
                values = [getattr(cell, field) / scale for cell in cells]
                plotting.draw_line(axis, [cell.context for cell in cells], values, **style)
            axis.set(ylabel=plotting.lower(unit), title=title)
            axis.set_ylim(bottom=0)
        axes[-1, 0].set_xlabel("tokens of context")
        plotting.legend(figure, axes[0, 0])


def _styles(report: Report) -> dict[str, dict[str, Any]]:
    """Of the base and every hybrid: colour, mark and name, as in the page."""
    look = looks(list(report.models))
    return {
        name: {"color": style.color, "marker": style.marker, "label": plotting.shown(name)}
        for name, style in look.items()
        if not is_control(name)
    }
