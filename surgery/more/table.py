"""The table that papers print, from finished reports: parameters, memory and speed, recall, language; and its two figures.

Models of several reports stand in one table. What was not measured is an empty cell. The best of a column is bold only where
its interval lies apart from all others' of the column: two intervals part later than that of the difference leaves out 0.
"""

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from surgery.errors import UserError
from surgery.evaluation.markdown import named_table
from surgery.evaluation.report import Report
from surgery.evaluation.results import ModelReport, Perplexity, value
from surgery.figures import plotting
from surgery.figures.chance import chance
from surgery.figures.lines import Figure, Point, Series, looks
from surgery.more.suites.ruler import RULER
from surgery.more.suites.ruler import TITLES as RULER_TITLES
from surgery.more.suites.standard import DOCUMENTS, NORMED, ZEROSHOT, norm_of
from surgery.statistics import Estimate, Proportion

REPORT = "report.json"
OF_KV, OF_TEXT = "Dictionaries (key-value retrieval)", "Language"
TITLES = {
    "swde": "SWDE", "fda": "FDA", "squad_completion": "SQuAD", "based_triviaqa": "TriviaQA", "based_nq_2048": "NQ",
    "based_drop": "DROP", "lambada_openai": "LAMBADA", "piqa": "PIQA", "hellaswag": "HellaSwag", "winogrande": "WinoGrande",
    "arc_easy": "ARC-E", "arc_challenge": "ARC-C", "hellaswag_norm": "HellaSwag, normed",
    "arc_challenge_norm": "ARC-C, normed", "openbookqa": "OBQA", "mmlu": "MMLU", "gsm8k": "GSM8K", "bbh": "BBH",
    "dream": "DREAM", "perplexity": "ppl", "sliding": "ppl, sliding", "knowledge": "knowledge", "letters": "letters",
}  # fmt: skip
# What guessing gives on the harness's tasks, where it is known. 0 where the answer is written.
GUESSED = {
    **dict.fromkeys(DOCUMENTS, 0.0), "lambada_openai": 0.0, "piqa": 0.5, "winogrande": 0.5, "hellaswag": 0.25,
    "arc_easy": 0.25, "arc_challenge": 0.25, "hellaswag_norm": 0.25, "arc_challenge_norm": 0.25,
    "mmlu": 0.25, "gsm8k": 0.0, "openbookqa": 0.25, "dream": 1 / 3,
}  # fmt: skip


@dataclass(frozen=True)
class TableCell:
    """low, high: of its 95% interval over n examples; None for what has none, a time or a mean of tasks."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None


@dataclass(frozen=True)
class TableColumn:
    """cells: by model, those that there are. unit: %, of a value from 0 to 1; MiB, ms, M (millions), or none. falls: less is
    better; None: neither. chance: what guessing gives, where it is known."""

    group: str
    title: str
    unit: str
    cells: Mapping[str, TableCell]
    falls: bool | None = False
    chance: float | None = None

    @property
    def head(self) -> str:
        """The title with its unit; percents stand without."""
        return f"{self.title} ({self.unit})" if self.unit not in ("", "%") else self.title

    def text(self, model: str) -> str:
        """Of a cell; empty where nothing was measured."""
        if (cell := self.cells.get(model)) is None:
            return ""
        if self.unit == "%":
            return f"{100 * cell.value:.1f}"
        return f"{cell.value:,.0f}" if cell.value >= 1000 else f"{cell.value:.3g}"

    @property
    def best(self) -> str | None:
        """The model whose interval lies apart from all others, on the better side."""
        if self.falls is None or len(self.cells) < 2:
            return None
        sign = -1.0 if self.falls else 1.0
        ends: dict[str, tuple[float, float]] = {}
        for model, cell in self.cells.items():
            if cell.low is None or cell.high is None:
                return None
            low, high = sorted((sign * cell.low, sign * cell.high))
            ends[model] = low, high
        first = max(ends, key=lambda model: ends[model][0])
        return first if all(high < ends[first][0] for model, (_, high) in ends.items() if model != first) else None

    @property
    def at_chance(self) -> bool:
        """Whether no model is above what guessing gives."""
        if self.chance is None:
            return False
        return all(cell.low is not None and cell.low <= self.chance for cell in self.cells.values())


def read(paths: Sequence[Path]) -> Report:
    """The first of some reports (or of the folders that hold them), with the models of all. The same weights in two reports are
    one model; where others have its name, it is named with its report's folder, or with a file's own name. Raises UserError for
    what is no report."""
    models: dict[str, ModelReport] = {}
    files = [path / REPORT if path.is_dir() else path for path in paths]
    reports = [Report.read(file) for file in files]
    for file, report in zip(files, reports, strict=True):
        for name, model in report.models.items():
            same = next((known for known, other in models.items() if _same(other, model)), None)
            if same is not None:
                models[same] = _joined(models[same], model)
                continue
            place = file.resolve().parent.name if file.name == REPORT else file.name.partition(".")[0]
            candidates = (name, f"{place} {name}", *(f"{name} {i}" for i in range(2, 10_000)))
            models[next(each for each in candidates if each not in models)] = model
    return reports[0].model_copy(update={"models": models})


def _same(one: ModelReport, other: ModelReport) -> bool:
    """Whether they are results of the same weights, measured in the same dtype."""
    if one.conditions is None or other.conditions is None:
        return False
    return (one.conditions.model, one.conditions.dtype) == (other.conditions.model, other.conditions.dtype)


def _joined(one: ModelReport, other: ModelReport) -> ModelReport:
    """Where both have a result, the first one's is kept."""
    changes = {
        "kv": {**other.kv, **one.kv},
        "tasks": {**other.tasks, **one.tasks},
        "cost": one.cost or other.cost,
        "speed": one.speed or other.speed,
        **{name: getattr(one, name) or getattr(other, name) for name in ("knowledge", "letters", "perplexity", "parameters")},
    }
    return one.model_copy(update=changes)


def columns(models: Mapping[str, ModelReport]) -> list[TableColumn]:
    """All that some model has, in the order of the table."""
    if not any(model.results() or model.cost or model.speed for model in models.values()):
        raise UserError("the reports hold no results")
    tasks = list(dict.fromkeys(task for model in models.values() for task in model.results()))
    groups: dict[str, list[str]] = {}
    for task in tasks:
        groups.setdefault(_group(task), []).append(task)
    language = [each for name in ZEROSHOT for each in (name, norm_of(name))]
    order = {name: i for i, name in enumerate([*RULER_TITLES, *DOCUMENTS, "perplexity", "sliding", *language])}
    result = _costs(models)
    for group in sorted(groups, key=_place):
        chosen = sorted(groups[group], key=lambda task: order.get(task.partition(".")[0], len(order)))
        result += [_measured(models, group, task) for task in chosen]
        if group == OF_TEXT:
            result += _mean(models, group)
    return result


def _group(task: str) -> str:
    family, _, size = task.partition(".")
    if family in RULER_TITLES:
        return f"RULER, {int(size):,} tokens"
    if family in ("kv", "kv_unseen"):
        return OF_KV
    if family in DOCUMENTS:
        return "Documents"
    return "Other retrieval" if size[:1].isdigit() else OF_TEXT


def _place(group: str) -> tuple[int, int]:
    if group.startswith("RULER"):
        return 0, int(re.sub(r"\D", "", group))
    return 1 + ("Documents", OF_KV, "Other retrieval", OF_TEXT).index(group), 0


def _measured(models: Mapping[str, ModelReport], group: str, task: str) -> TableColumn:
    cells: dict[str, TableCell] = {}
    unit, falls = "%", False
    for name, model in models.items():
        match model.results().get(task):
            case Proportion() as result:
                cells[name] = TableCell(result.accuracy, *result.ci95, result.n)
            case Estimate() as result:
                cells[name] = TableCell(result.value, *result.ci95, result.n)
            case Perplexity() as result:
                low, high = (result.value * math.exp(min(end - result.loss.value, 700.0)) for end in result.loss.ci95)
                cells[name], unit, falls = TableCell(result.value, low, high, result.loss.n), "", True
    family, _, size = task.partition(".")
    if family in ("recall_hits", "other_tokens"):
        unit, falls = "nats", True
    known = chance(task)
    return TableColumn(group, _title(family, size), unit, cells, falls, GUESSED.get(task) if known is None else known)


def _title(family: str, size: str) -> str:
    if family in RULER_TITLES:
        return RULER_TITLES[family]
    if family == "kv":
        return f"{size} pairs"
    if family == "kv_unseen":
        return f"{size} pairs, unseen keys"
    return TITLES.get(family, family.replace("_", " ")) + (f" {size.replace('.', ' at ')}" if size else "")


def _mean(models: Mapping[str, ModelReport], group: str) -> list[TableColumn]:
    """As papers take it: of the six tasks, two by their length-normalised accuracy. Of models that were asked all. Without an
    interval: the tasks are no sample of anything."""
    cells, tasks = {}, [norm_of(name) if name in NORMED else name for name in ZEROSHOT]
    for name, model in models.items():
        if all(task in (results := model.results()) for task in tasks):
            cells[name] = TableCell(sum(value(results[task]) for task in tasks) / len(tasks))
    return [TableColumn(group, "mean of six", "%", cells, None)] if cells else []


def _costs(models: Mapping[str, ModelReport]) -> list[TableColumn]:
    """Parameters, memory of a cache by length, and time at the longest length that all were timed at."""
    group = "Size, memory and speed (batch 1)"
    counts = {name: TableCell(model.parameters / 1e6) for name, model in models.items() if model.parameters is not None}
    result = [TableColumn(group, "parameters", "M", counts, None)] if counts else []
    held: dict[int, dict[str, TableCell]] = {}
    for name, model in models.items():
        for context, size in cache_sizes(model).items():
            held.setdefault(context, {})[name] = TableCell(size / 2**20, size / 2**20, size / 2**20)  # counted, so exact
    result += [TableColumn(group, f"cache at {context:,}", "MiB", cells, True) for context, cells in sorted(held.items())]

    def timed(title: str, unit: str, scale: float, of: Callable[[ModelReport], dict[int, float]]) -> list[TableColumn]:
        each = {name: of(model) for name, model in models.items() if of(model)}
        common = sorted(set.intersection(*({*times} for times in each.values()))) if each else []
        if not common:
            return []
        cells = {name: TableCell(times[common[-1]] / scale) for name, times in each.items()}
        return [TableColumn(group, f"{title} at {common[-1]:,}", unit, cells, None)]

    result += timed("prefill", "ms", 1, lambda m: {s.context: s.prefill_milliseconds for s in m.speed if s.batch == 1})
    result += timed(
        "a token", "ms", 1,
        lambda m: {s.context: s.decode_milliseconds for s in m.speed if s.batch == 1}
        or {c.context: c.milliseconds for c in m.cost},
    )  # fmt: skip
    return result + timed("peak", "MiB", 2**20, lambda m: {s.context: float(s.peak_bytes) for s in m.speed if s.batch == 1})


def cache_sizes(model: ModelReport) -> dict[int, int]:
    """Context -> the bytes that the cache of one sequence holds."""
    single = {cell.context: cell.cache_bytes for cell in model.speed if cell.batch == 1}
    return {cell.context: cell.cache_bytes for cell in model.cost} | single


def _body(columns: Sequence[TableColumn], models: Iterable[str], best: str) -> list[list[str]]:
    """A row for each model that has a cell in one of the columns. best: how the best cell of a column is written."""
    named = [name for name in models if any(name in column.cells for column in columns)]
    return [[name, *(best.format(c.text(name)) if c.best == name else c.text(name) for c in columns)] for name in named]


def markdown(found: list[TableColumn], models: Iterable[str]) -> str:
    """A table for each group, and what has to be known to read them."""
    parts = []
    for group, chosen in _by_group(found).items():
        body = _body(chosen, models, "**{}**")
        table = named_table(["model", *(column.head for column in chosen)], body)
        parts.append(f"### {group}\n\n{table}\n\n{_said(chosen)}")
    return "\n".join(parts)


def _said(chosen: list[TableColumn]) -> str:
    """How many examples, what is at chance, and what is bold."""
    lines = []
    counts = sorted({cell.n for column in chosen for cell in column.cells.values() if cell.n is not None})
    if counts:
        shares = [cell for column in chosen if column.unit == "%" for cell in column.cells.values()]
        widths = [(cell.high - cell.low) / 2 for cell in shares if cell.low is not None and cell.high is not None]
        few = f"n = {counts[0]:,}" if len(counts) == 1 else f"n = {counts[0]:,} to {counts[-1]:,}"
        wide = f"; 95% intervals are ± {100 * max(widths):.1f} points or narrower" if widths else ""
        lines.append(f"{'Percent; ' * bool(shares)}{few}{wide}.")
    guessed = [column for column in chosen if column.chance is not None and column.falls is False]
    if at := [column.title for column in guessed if column.at_chance]:
        lines.append(f"No model is above chance in {', '.join(at) if len(at) < len(guessed) else 'any of these'}.")
    return " ".join(lines) + "\n" if lines else ""


def _by_group(found: list[TableColumn]) -> dict[str, list[TableColumn]]:
    groups: dict[str, list[TableColumn]] = {}
    for column in found:
        if column.cells:
            groups.setdefault(column.group, []).append(column)
    return groups


LATEX = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", **{c: f"\\{c}" for c in "&%$#_{}"}}
)


def latex(found: list[TableColumn], models: Iterable[str]) -> str:
    """A tabular for each group, for booktabs."""
    parts = ["% \\usepackage{booktabs}"]
    for group, chosen in _by_group(found).items():
        rows = [[name.translate(LATEX), *texts] for name, *texts in _body(chosen, models, "\\textbf{{{}}}")]
        head = ["model", *(column.head.translate(LATEX) for column in chosen)]
        lines = [f"% {group}. {_said(chosen).strip()}", f"\\begin{{tabular}}{{l{'r' * len(chosen)}}}", "\\toprule"]
        lines += [" & ".join(head) + " \\\\", "\\midrule", *(" & ".join(row) + " \\\\" for row in rows)]
        parts.append("\n".join([*lines, "\\bottomrule", "\\end{tabular}"]))
    return "\n\n".join(parts) + "\n"


def as_csv(found: list[TableColumn]) -> str:
    """A row for each cell, with interval, n and chance; accuracies from 0 to 1."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["group", "column", "unit", "model", "value", "low", "high", "n", "chance"])
    for column in found:
        for model, cell in column.cells.items():
            place = [column.group, column.title, "" if column.unit == "%" else column.unit, model]
            writer.writerow([*place, cell.value, cell.low, cell.high, cell.n, column.chance])  # None becomes an empty cell
    return out.getvalue()


def memory_figure(models: Mapping[str, ModelReport]) -> Figure | None:
    """All of RULER over the size of the cache: a line a model, a point for each length at which both are known."""
    points: dict[str, list[Point]] = {}
    for name, model in models.items():
        results, sizes = model.results(), cache_sizes(model)
        for context, size in sorted(sizes.items()):
            if (task := f"{RULER}.{context}") in results:
                mean = value(results[task])
                points.setdefault(name, []).append(Point(float(round(size / 2**10)), mean, f"{mean:.3f} at {context:,} tokens"))
    if len(points) < 2:
        return None
    look = looks(list(models))
    lines = tuple(Series(name, look[name], tuple(of)) for name, of in points.items())
    return Figure("RULER, all tasks", "KiB of cache", "KiB", plotting.ACCURACY, lines, top=1.0)
