"""What report.html says of each model against the base: every difference as text, as a mark and as a verdict."""

from dataclasses import dataclass

from surgery.evaluation import markdown
from surgery.evaluation.judgement import heading, verdict
from surgery.evaluation.results import ModelReport, Perplexity, Results, is_loss
from surgery.figures.charts import Bar, bar, minus
from surgery.records.names import is_control
from surgery.statistics import Estimate, Proportion

MOST_NAMED = 6  # tasks in a sentence
SYMBOLS = {"better": "▲", "worse": "▼", "none": "=", "unknown": "?"}  # a verdict is never told by its colour alone


@dataclass(frozen=True)
class Difference:
    """A comparison with the base. verdict: better, worse, none or unknown. words: empty where the report has no test of it."""

    task: str
    base: str
    model: str
    change: str
    bar: Bar
    verdict: str
    words: str


@dataclass(frozen=True)
class Summary:
    """What is said of one model. decisive: its difference in the largest retrieval, if that was measured; headline: the same in
    a sentence."""

    name: str
    description: str
    places: str
    headline: str
    differences: list[Difference]
    decisive: Difference | None
    sentences: list[str]


def summaries(report: Results) -> list[Summary]:
    """Of every model but the base."""
    changes = [item for model in report.models.values() for item in model.change.items()]
    bounds = {loss: _bound([change for task, change in changes if is_loss(task) == loss]) for loss in (True, False)}
    return [_summary(report, name, bounds) for name in list(report.models)[1:]]


def closest_control(report: Results) -> str:
    """The control that gains most, in the words of a sceptic."""
    base = report.base
    controls = {name: model for name, model in report.models.items() if is_control(name)}
    if not (controls and base.kv):
        return ""
    task = f"kv.{max(base.kv, key=int)}"
    name = max(controls, key=lambda name: controls[name].change[task].value)
    change = change_text(task, controls[name].change[task])
    which = "the only one" if len(controls) == 1 else f"of {len(controls)} the one that gains most at {heading(task)}"
    return f"{name}, {which}: {change}."


def result_text(result: Proportion | Estimate | Perplexity) -> str:
    """A result with its 95% interval, of a perplexity the loss in nats per token."""
    if isinstance(result, Perplexity):
        low, high = result.loss.ci95
        return f"{result.loss.value:.4f} [{low:.4f}, {high:.4f}]"
    return result.unsigned() if isinstance(result, Estimate) else str(result)


def change_text(task: str, change: Estimate) -> str:
    """In points of a hundred, a loss in nats, with a proper minus."""
    scale, places, unit = (1, 4, "nats") if is_loss(task) else (100, 1, "points")
    middle, low, high = (f"{scale * part:+.{places}f}" for part in (change.value, *change.ci95))
    return minus(f"{middle} {unit} [{low}, {high}]")


def _summary(report: Results, name: str, bounds: dict[bool, float]) -> Summary:
    base, model = report.base, report.models[name]
    differences = [_difference(base, model, task, bounds[is_loss(task)]) for task in model.change if task in base.results()]
    headline, decisive = "", None
    if base.kv:  # the largest size, and not the one that looks best
        size = max(base.kv, key=int)
        decisive = next(difference for difference in differences if difference.task == heading(f"kv.{size}"))
        headline = (
            f"With {size} pairs, the largest dictionary, it answers {100 * model.kv[size].accuracy:.1f}% of the questions; the "
            f"base {100 * base.kv[size].accuracy:.1f}%. That is {decisive.change}"
            + (f": {decisive.words}." if decisive.words else ".")
        )
    sentences = [_tally(differences), *_exceptions(differences), _price(base, model)]
    places = markdown.sites_text(model.plan) if model.plan else ""
    return Summary(name, model.description, places, headline, differences, decisive, [text for text in sentences if text])


def _difference(base: ModelReport, model: ModelReport, task: str, bound: float) -> Difference:
    change, evidence = model.change[task], model.evidence.get(task)
    words = verdict(task, change, evidence) if evidence else ""
    kind = "unknown" if evidence is None or evidence.detectable is None else "none"
    if evidence is not None and evidence.differs:
        kind = words.split()[0]
    elif words.startswith("perhaps"):
        kind = "unknown"
    before, after = base.results()[task], model.results()[task]
    return Difference(
        markdown.unit(task), result_text(before), result_text(after), change_text(task, change),
        bar(change, bound, kind), kind, words,
    )  # fmt: skip


def _tally(differences: list[Difference]) -> str:
    tested = [difference for difference in differences if difference.words]
    counts = {kind: sum(difference.verdict == kind for difference in tested) for kind in SYMBOLS}
    kinds = {"better": "better", "worse": "worse", "none": "without a difference seen", "unknown": "not decided"}
    parts = ", ".join(f"{n} {kinds[kind]}" for kind, n in counts.items() if n)
    return f"Of {len(tested)} comparisons with the base: {parts}." if tested else ""


def _exceptions(differences: list[Difference]) -> list[str]:
    """What got worse, and what a small n may have hidden."""
    worse = [f"{difference.task} {difference.change}" for difference in differences if difference.verdict == "worse"]
    unsure = [difference.task for difference in differences if difference.words.startswith("no difference seen, but")]
    return [
        *([f"Worse: {'; '.join(worse)}."] if worse else []),
        *([f"Too few examples to see small differences: {', '.join(unsure)}."] if 0 < len(unsure) <= MOST_NAMED else []),
        *([f"Too few examples to see small differences in {len(unsure)} of them."] if len(unsure) > MOST_NAMED else []),
    ]


def _price(base: ModelReport, model: ModelReport) -> str:
    if not (base.cost and model.cost):
        return ""
    before, after = base.cost[-1], model.cost[-1]
    return (
        f"After {after.context:,} tokens its cache holds {after.cache_bytes / 1024:,.0f} KiB (base "
        f"{before.cache_bytes / 1024:,.0f}) and a token takes {after.milliseconds:.2f} ms (base {before.milliseconds:.2f})."
    )


def _bound(changes: list[Estimate]) -> float:
    return max((abs(end) for change in changes for end in change.ci95), default=0.0) or 1.0
