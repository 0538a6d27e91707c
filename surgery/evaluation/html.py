"""report.html: one file that shows all of a report and loads nothing, in any browser and in print.

Here is decided what is shown; charts.py gives the figures their geometry, page/ draws. What is drawn is in the file before any
script runs: the scripts only say more about what one points at.
"""

import io
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from surgery.evaluation import markdown
from surgery.evaluation.atlas_page import Atlas, atlas
from surgery.evaluation.charts import Bar, Chart, Look, Point, Series, bar, chart, looks, minus
from surgery.evaluation.head_matrices import Mixing
from surgery.evaluation.judgement import did_it_help
from surgery.evaluation.report import LOSSES, ModelReport, Perplexity, Report, value
from surgery.locating.ranking import Ranking
from surgery.statistics import Estimate, Proportion

NAMED = 6  # tasks in a sentence
SYMBOLS = {"better": "▲", "worse": "▼", "none": "=", "unknown": "?"}  # a verdict is never told by its colour alone


@dataclass(frozen=True)
class Difference:
    """A comparison with the base, as text, as a mark, and as a verdict: better, worse, none or unknown. words: empty where the
    report holds no test of it."""

    task: str
    base: str
    model: str
    change: str
    bar: Bar
    verdict: str
    words: str


@dataclass(frozen=True)
class Subject:
    """What is said of one model. decisive: its difference in the largest retrieval, if that was measured; headline: the same in
    a sentence."""

    name: str
    description: str
    places: str
    headline: str
    differences: list[Difference]
    decisive: Difference | None
    sentences: list[str]


def render(report: Report, ranking: Ranking | None = None, mixing: Mixing | None = None) -> str:
    """The page. ranking: of the base, for the atlas; one of another model is left out."""
    names = list(report.models)
    if ranking is not None and ranking.provenance.base_fingerprint != report.provenance.base_fingerprint:
        ranking = None
    seen = looks([name for name in names if not name.startswith("dose_")])
    base, *others = report.models.items()
    changes = [one for model in report.models.values() for one in model.change.items()]
    bounds = {loss: _bound([change for task, change in changes if (task in LOSSES) == loss]) for loss in (True, False)}
    subjects = [_subject(report, name, bounds) for name, _ in others]
    folder = Path(__file__).parent / "page"
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    shown: dict[str, Any] = {
        "report": report, "base": base[0], "explanation": markdown.EXPLANATION, "looks": seen, "symbols": SYMBOLS,
        "hybrids": [s for s in subjects if _hybrid(s.name)],
        "controls": [s for s in subjects if s.name.startswith("control")],
        "answers": did_it_help(report).split("\n\n"),
        "closest": _closest(report), "results": markdown.rows(report), "subjects": subjects,
        "retrieval": _retrieval(report, seen), "doses": _doses(report), "costs": _costs(report, seen),
        "atlas": atlas(ranking, report.plan) if ranking else Atlas(), "mixing": _mixing(mixing) if mixing else None,
        "compared": sum(len(model.evidence) for model in report.models.values()),
        "counts": _span([_count(result) for result in base[1].results().values()]),
        "recipe": yaml.safe_dump(report.provenance.recipe, sort_keys=False) if report.provenance.recipe else "",
        "plan": report.plan.model_dump_json(indent=2, exclude={"provenance"}) if report.plan else "",
        "style": (folder / "page.css").read_text(encoding="utf-8"), "script": (folder / "page.js").read_text(encoding="utf-8"),
    }  # fmt: skip
    return environment.get_template("page.html.j2").render(shown)


def _hybrid(name: str) -> bool:
    return not name.startswith(("control", "dose_"))


def _subject(report: Report, name: str, bounds: dict[bool, float]) -> Subject:
    base, model = next(iter(report.models.values())), report.models[name]
    before, after = base.results(), model.results()
    found = []
    for task, change in model.change.items():
        said = model.evidence.get(task)
        words = markdown.verdict(task, change, said) if said else ""
        verdict = "unknown" if said is None or said.detectable is None else "none"
        if said is not None and said.differs:
            verdict = words.split()[0]
        elif words.startswith("perhaps"):
            verdict = "unknown"
        shown = bar(change, bounds[task in LOSSES], verdict)
        found.append(
            Difference(
                markdown.heading(task), _text(before[task]), _text(after[task]), _change(task, change), shown, verdict, words
            )
        )
    headline, decisive = "", None
    if base.kv:  # the largest size, and not the one that looks best
        size = max(base.kv, key=int)
        decisive = next(one for one in found if one.task == markdown.heading(f"kv.{size}"))
        headline = (
            f"With {size} pairs, the largest dictionary, it answers {100 * model.kv[size].accuracy:.1f}% of the questions; the "
            f"base {100 * base.kv[size].accuracy:.1f}%. That is {decisive.change}"
            + (f": {decisive.words}." if decisive.words else ".")
        )
    return Subject(
        name, model.description, markdown.places(model.plan) if model.plan else "", headline, found, decisive,
        [s for s in (_tally(found), *_named(found), _price(base, model)) if s],
    )  # fmt: skip


def _tally(found: list[Difference]) -> str:
    found = [d for d in found if d.words]
    counts = {kind: sum(d.verdict == kind for d in found) for kind in SYMBOLS}
    kinds = {"better": "better", "worse": "worse", "none": "without a difference seen", "unknown": "not decided"}
    said = ", ".join(f"{n} {kinds[kind]}" for kind, n in counts.items() if n)
    return f"Of {len(found)} comparisons with the base: {said}." if found else ""


def _named(found: list[Difference]) -> list[str]:
    """What got worse, and what a small n may have hidden."""
    worse = [f"{d.task} {d.change}" for d in found if d.verdict == "worse"]
    unsure = [d.task for d in found if d.words.startswith("no difference seen, but")]
    return [
        *([f"Worse: {'; '.join(worse)}."] if worse else []),
        *([f"Too few examples to see small differences: {', '.join(unsure)}."] if 0 < len(unsure) <= NAMED else []),
        *([f"Too few examples to see small differences in {len(unsure)} of them."] if len(unsure) > NAMED else []),
    ]


def _price(base: ModelReport, model: ModelReport) -> str:
    if not (base.cost and model.cost):
        return ""
    before, after = base.cost[-1], model.cost[-1]
    return (
        f"After {after.context:,} tokens its cache holds {after.cache_bytes / 1024:,.0f} KiB (base "
        f"{before.cache_bytes / 1024:,.0f}) and a token takes {after.milliseconds:.2f} ms (base {before.milliseconds:.2f})."
    )


def _closest(report: Report) -> str:
    """The control that comes closest, in the words of a sceptic."""
    base = next(iter(report.models.values()))
    controls = {name: model for name, model in report.models.items() if name.startswith("control")}
    if not (controls and base.kv):
        return ""
    task = f"kv.{max(base.kv, key=int)}"
    name = max(controls, key=lambda name: controls[name].change[task].value)
    change = _change(task, controls[name].change[task])
    return f"Of {len(controls)} controls, {name} gains most at {markdown.heading(task)}: {change}."


def _retrieval(report: Report, seen: dict[str, Look]) -> list[Chart]:
    """Accuracy over size, for every probe that was asked in several sizes; the needle at each depth."""
    families: dict[tuple[str, str], dict[str, str]] = {}
    for task in next(iter(report.models.values())).results():
        family, _, rest = task.partition(".")
        size, _, depth = rest.partition(".")
        if size.isdigit():
            families.setdefault((family, depth), {})[task] = size
    charts = []
    for (family, depth), sizes in families.items():
        if family == markdown.UNSEEN and len(sizes) == 1:
            continue  # it has its column in the table
        series = [
            Series(
                name, seen[name], tuple(_point(float(x), model.results()[t]) for t, x in sizes.items() if t in model.results())
            )
            for name, model in report.models.items()
            if name in seen
        ]
        kv, where = family in ("kv", markdown.UNSEEN), f" at depth {depth}%" if depth else ""
        title = "Key-value retrieval" if kv else family.replace("_", " ") + where
        title += ", keys that no lesson holds" if family == markdown.UNSEEN else ""
        unit = "pairs" if kv else "tokens" if family == "needle" else "size"
        label = "pairs in the dictionary" if kv else unit
        charts.append(chart(title, label, "accuracy", series, unit=unit, top=1.0, chance=kv))
    return charts


def _doses(report: Report) -> list[Chart]:
    doses = dict(sorted(markdown.dosed(report).items()))
    sizes = list(next(iter(doses.values())).kv) if len(doses) > 1 else []
    if not sizes:
        return []
    seen = looks([f"{size} pairs" for size in sizes])
    series = [
        Series(name, seen[name], tuple(_point(dose, model.kv[size]) for dose, model in doses.items()))
        for name, size in zip(seen, sizes, strict=True)
    ]
    return [chart("Dose and response", "grafted heads", "accuracy", series, unit="heads", top=1.0)]


def _costs(report: Report, seen: dict[str, Look]) -> list[Chart]:
    """Time and memory against context. A control costs what its model costs and is left out."""
    first = next(iter(report.models.values()))
    shown = {name: model for name, model in report.models.items() if _hybrid(name)}

    def drawn(title: str, unit: str, points: Callable[[ModelReport], list[tuple[int, float]]]) -> Chart:
        series = [
            Series(name, seen[name], tuple(Point(x, y, f"{y:,.3g} {unit}") for x, y in points(model)))
            for name, model in shown.items()
        ]
        return chart(title, "tokens of context", unit, series, unit="tokens")

    def fast(title: str, unit: str, field: str, scale: int, batch: int) -> Chart:
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
            fast("Prefill", "ms", "prefill_milliseconds", 1, batch),
            fast("One more token", "ms", "decode_milliseconds", 1, batch),
            fast("Memory of the prefill", "MiB", "peak_bytes", 2**20, batch),
        ]
    return charts


def _mixing(mixing: Mixing) -> dict[str, Any]:
    """Every panel's matrices as images, with what is needed to say what a row draws on."""
    palette = (matplotlib.colormaps["magma"](np.arange(256))[:, :3] * 255).astype(np.uint8)
    panels = []
    for panel in mixing.panels:
        models = []
        for name, weights in panel.models.items():
            shares = weights.shares()
            image, file = Image.fromarray(np.round(255 * np.sqrt(shares)).astype(np.uint8), mode="P"), io.BytesIO()
            image.putpalette(palette.tobytes())
            image.save(file, "PNG", optimize=True)
            models.append(
                {"name": name, "png": b64encode(file.getvalue()).decode(), "rows": weights.rows, "answer": weights.answer,
                 "last": [round(float(share), 4) for share in shares[-1]], "heads": panel.heads.get(name)}
            )  # fmt: skip
        panels.append({"site": str(panel.site), "models": models})
    return {"tokens": [token.replace("\\n", "↵") or "␣" for token in mixing.tokens], "answer": mixing.answer, "panels": panels}


def _bound(changes: list[Estimate]) -> float:
    return max((abs(end) for change in changes for end in change.ci95), default=0.0) or 1.0


def _point(x: float, result: Proportion | Estimate | Perplexity) -> Point:
    low, high = (result.loss if isinstance(result, Perplexity) else result).ci95
    return Point(x, value(result), f"{_text(result)}, n = {_count(result):,}", low, high)


def _text(result: Proportion | Estimate | Perplexity) -> str:
    if isinstance(result, Perplexity):
        low, high = np.exp(result.loss.ci95)
        return f"{result.value:.3f} [{low:.3f}, {high:.3f}]"
    return f"{value(result):.3f} [{result.ci95[0]:.3f}, {result.ci95[1]:.3f}]"


def _change(task: str, change: Estimate) -> str:
    """In points of a hundred, a loss in nats, with a proper minus."""
    scale, places, unit = (1, 4, "nats") if task in LOSSES else (100, 1, "points")
    value, low, high = (f"{scale * part:+.{places}f}" for part in (change.value, *change.ci95))
    return minus(f"{value} {unit} [{low}, {high}]")


def _count(result: Proportion | Estimate | Perplexity) -> int:
    return result.loss.n if isinstance(result, Perplexity) else result.n


def _span(counts: list[int]) -> str:
    return " to ".join(f"{n:,}" for n in sorted({min(counts), max(counts)})) if counts else ""
