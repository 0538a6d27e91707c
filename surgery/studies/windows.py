"""Windows against the cache: what attention heads that forget cost, by the ranking and at random.

Groups of attention heads get a window one after another, those first whose ablation costs least; beside each number stand as
many groups drawn at random. Where the recipe's plan has grafts, these are measured alone and beside the windows. Every plan is
asked the same questions and reads the same text, so that all differences are paired, and its cache is counted from tensors.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from surgery.choosing.bounded import Measuring
from surgery.choosing.windows import least_needed
from surgery.errors import UserError
from surgery.evaluation.results import value
from surgery.evaluation.suites import bench_seed
from surgery.jobs.locating_stage import located
from surgery.locating.planning import plan
from surgery.models.cache import cache_after, cache_parts, prefilled
from surgery.probes import make
from surgery.records.plan import Plan, PlanWindows
from surgery.records.recipe import Recipe, changed
from surgery.records.sections.section import Count
from surgery.records.site import Site
from surgery.runtime import plotting
from surgery.splicing.splice import install
from surgery.statistics import Estimate, Proportion, difference, proportion
from surgery.studies.figures import AT_RANDOM
from surgery.studies.study import Findings, Measurements, Row, Study, Subjects
from surgery.tuning.batches import held_out_windows

SEED = 20_011  # of the windows of text, added to the recipe's: locating has others
BASE, GRAFTS, WINDOWS, BOTH, RANDOM = "base", "grafts", "windows", "grafts and windows", f"windows {AT_RANDOM}"
RETRIEVAL, CHANGE, TEXT = "retrieval", "retrieval, change", "loss on text, change in nats"
POINT, NATS = 0.01, 0.01  # what may be lost of retrieval and of text
COLORS = {BASE: "#24292F", GRAFTS: "#E69F00", WINDOWS: "#0072B2", BOTH: "#009E73", RANDOM: "#D55E00"}


class WindowsAgainstCache(Study):
    """draws: of random groups, for each number of them. tokens: after which the cache is counted. healed: numbers of groups
    whose windows are also tuned, for tune.steps steps with the adapters of tune.lora. The recipe's plan.window says how long
    windows are; with plan.kind head, its grafts are measured, too. bench.limit questions of locate.probe are asked, and
    bench.windows windows of text."""

    title: ClassVar[str] = "Retrieval against the bytes of the cache"

    draws: Count = 3
    tokens: Count = 32_768
    healed: tuple[Count, ...] = Field(default=())

    def check(self, recipe: Recipe) -> None:
        if recipe.plan.window is None or recipe.plan.kind == "layer":
            raise UserError("the study 'windows' needs plan.window, and plan.kind window or head")
        if self.healed and (recipe.tune.lora is None or recipe.tune.steps == "auto"):
            raise UserError("study.healed: adapters are tuned: set tune.lora, and tune.steps to a number")

    def measure(self, subjects: Subjects) -> Measurements:
        subject, recipe, out = subjects.subject, subjects.recipe, subjects.out
        exact = changed(recipe, locate={"exact": True})
        ranking = located(exact, subjects.checkpoint, out, resume=subjects.resume, figures=False, subject=subject)
        order = least_needed(subject.model, ranking)
        probe: Any = make(recipe.locate.probe, **recipe.locate.options)
        questions = probe.questions(recipe.bench.limit, bench_seed(recipe.seed))
        text = held_out_windows(subject.tokenizer, recipe.data, recipe.tune, recipe.bench.windows, recipe.seed + SEED)
        measuring = Measuring(
            subject, questions, text, recipe.bench.batch_size, out / "measured", tuning=recipe.tune, data=recipe.data,
            seed=recipe.seed,
        )  # fmt: skip
        grafts = plan(ranking, **recipe.plan.given(), seed=recipe.seed) if recipe.plan.kind == "head" else None
        plans = {BASE: None, **({GRAFTS: grafts} if grafts else {}), **self._windowed(recipe, order, grafts)}
        (before, *rest) = measuring.measure(list(plans.values()), "plans")
        rows = [Row(what=BASE, figures={RETRIEVAL: proportion(before.correct)})]
        now = dict(zip([*plans][1:], rest, strict=True))
        for count in self.healed:
            names = [name for name in plans if name.startswith((f"{WINDOWS}, {count} of", f"{RANDOM}, {count} of"))]
            tuned = measuring.measure([plans[name] for name in names], f"{count} windows, tuned", int(recipe.tune.steps))
            now |= {f"{name}, tuned": each for name, each in zip(names, tuned, strict=True)}
        for name, each in now.items():
            figures: dict[str, Proportion | Estimate] = {
                RETRIEVAL: proportion(each.correct), CHANGE: difference(before.correct, each.correct),
                TEXT: difference(before.text, each.text),
            }  # fmt: skip
            rows.append(Row(what=name, figures=figures))
        cache = {name: self._bytes(install(subject.model, of).eval() if of else subject.model) for name, of in plans.items()}
        about = {
            "groups": [str(site) for site in order], "tokens": self.tokens,
            "cache bytes": {name: whole for name, (whole, _) in cache.items()},
            "attention bytes": {name: attention for name, (_, attention) in cache.items()},
            "sites": {name: [str(site) for site in of.windows.sites] for name, of in plans.items() if of and of.windows},
        }  # fmt: skip
        about |= {"grafts": [str(site) for site in grafts.sites] if grafts else []}
        return Measurements(about=about, summary="\n".join(summarise(about, rows)), rows=tuple(rows))

    def _windowed(self, recipe: Recipe, order: Sequence[Site], grafts: Plan | None) -> dict[str, Plan]:
        assert recipe.plan.window is not None
        first, length = recipe.plan.window.first, recipe.plan.window.length

        def at(sites: Sequence[Site], beside: Plan | None = None) -> Plan:
            windows = PlanWindows(sites=tuple(sites), first=first, length=length)
            return Plan(kind="window", windows=windows) if beside is None else beside.model_copy(update={"windows": windows})

        plans: dict[str, Plan] = {}
        for count in range(1, len(order) + 1):
            of = f"{count} of {len(order)} groups"
            plans[f"{WINDOWS}, {of}"] = at(order[:count])
            if grafts is not None:
                plans[f"{BOTH}, {of}"] = at(order[:count], grafts)
            for draw in range(self.draws if count < len(order) else 0):
                drawn = random.Random(f"{recipe.seed} {count} {draw}").sample(list(order), count)
                plans[f"{RANDOM}, {of}, draw {draw + 1}"] = at(drawn)
        return plans

    def _bytes(self, model: Any) -> tuple[int, int]:
        """What the whole cache takes, and its keys and values."""
        parts = cache_parts(prefilled(model, 64))
        fixed = sum(size for part, size in parts.items() if part not in ("keys", "values"))
        whole = cache_after(model, self.tokens)
        return whole, whole - fixed

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        """Retrieval against the cache: a line for what the ranking says, a point for each draw."""
        held = findings.about["cache bytes"]
        with plotting.drawing(path, height=4.4, width=7.0) as (figure, axes):
            axis, labelled = axes[0, 0], set[str]()
            for row in findings.rows:
                plain = row.what.removesuffix(", tuned")
                kind, tuned = plain.partition(",")[0], plain != row.what
                cell, mib = row.figures[RETRIEVAL], held[plain] / 2**20
                errors = [[value(cell) - cell.ci95[0]], [cell.ci95[1] - value(cell)]]
                label = f"{kind}, tuned" if tuned else kind
                axis.errorbar(
                    mib, value(cell), errors, fmt="s" if tuned else "o", ms=6, lw=1, color=COLORS[kind], capsize=2,
                    mfc="white" if kind == RANDOM else COLORS[kind], label=None if label in labelled else label,
                    zorder=2 if kind == RANDOM else 3,
                )  # fmt: skip
                labelled.add(label)
            for kind in (WINDOWS, BOTH):
                start = BASE if kind == WINDOWS else GRAFTS
                line = [row for row in findings.rows if _is(row, kind)]
                line = [row for row in findings.rows if row.what == start and line] + line
                sizes, heights = [held[row.what] / 2**20 for row in line], [value(row.figures[RETRIEVAL]) for row in line]
                axis.plot(sizes, heights, lw=1.2, color=COLORS[kind])
            plotting.accuracy_axis(axis, xlabel=plotting.lower(f"MiB of cache after {findings.about['tokens']:,} tokens"))
            axis.set_xlim(left=0)
            axis.set_title(_headline(findings.about, findings.rows))
            plotting.legend(figure, axis)


def _is(row: Row, kind: str) -> bool:
    return row.what.startswith(f"{kind}, ") and not row.what.endswith(", tuned")


def _count(row: Row) -> int:
    return int(row.what.partition(", ")[2].split()[0])


def kept(row: Row) -> bool:
    """Whether retrieval and text are within a point and a hundredth of a nat of the base's."""
    return value(row.figures[CHANGE]) >= -POINT and value(row.figures[TEXT]) <= NATS


def half(about: dict[str, Any], rows: Sequence[Row]) -> Row:
    """The fewest windows by the ranking with which the attention's cache is half of the base's or less, to a hundredth: windows
    keep a few tokens."""
    held = about["attention bytes"]
    windowed = [row for row in rows if _is(row, WINDOWS)]
    return next((row for row in windowed if round(held[row.what] / held[BASE], 2) <= 0.5), windowed[-1])


def _draws(rows: Sequence[Row], of: Row, tuned: bool = False) -> list[Row]:
    return [
        row for row in rows
        if row.what.startswith(f"{RANDOM}, {_count(of)} of") and row.what.endswith(", tuned") == tuned
    ]  # fmt: skip


def summarise(about: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """What half of the attention's cache costs, by the ranking and at random, as it is and tuned; a sentence each."""
    row, held, groups = half(about, rows), about["attention bytes"], len(about["groups"])
    share = held[row.what] / held[BASE]
    lines = [
        f"Windows for {_count(row)} of {groups} groups of attention heads leave {share:.2f} of the attention's cache after "
        f"{about['tokens']:,} tokens ({held[BASE]:,} to {held[row.what]:,} bytes): {_told([row])}"
    ]
    if drawn := _draws(rows, row):
        lines.append(f"As many groups at random, {len(drawn)} draws: {_told(drawn)}")
    for other in rows:
        if other.what.startswith(WINDOWS + ",") and other.what.endswith(", tuned"):
            lines.append(f"Tuned, {_count(other)} of {groups} groups: by the ranking {_told([other])}")
            if drawn := _draws(rows, other, tuned=True):
                lines[-1] = f"{lines[-1][:-1]}; at random {_told(drawn)}"
    most = max((_count(each) for each in rows if _is(each, WINDOWS) and kept(each)), default=0)
    lines.append(
        f"Untrained, windows by the ranking keep retrieval within {POINT:g} and text within {NATS:g} nats of the base's for "
        f"{f'{most} of {groups} groups' if most else 'no group'}."
    )
    return lines


def _told(rows: Sequence[Row]) -> str:
    """Of one row with its intervals; of several from the least to the largest."""
    if len(rows) == 1:
        change, text = rows[0].figures[CHANGE], rows[0].figures[TEXT]
        low, high = text.ci95
        return f"retrieval {change}, text {value(text):+.4f} nats [{low:+.4f}, {high:+.4f}]."
    changes, texts = ([value(row.figures[column]) for row in rows] for column in (CHANGE, TEXT))
    return (
        f"retrieval {min(changes):+.3f} to {max(changes):+.3f}, text {min(texts):+.4f} to {max(texts):+.4f} nats; "
        f"{sum(map(kept, rows))} of {len(rows)} keep both."
    )


def _headline(about: dict[str, Any], rows: Sequence[Row]) -> str:
    row, held = half(about, rows), about["attention bytes"]
    change = value(row.figures[CHANGE])
    drawn = [value(each.figures[CHANGE]) for each in _draws(rows, row)]
    at_random = f"; at random {min(drawn):+.3f} to {max(drawn):+.3f}" if drawn else ""
    share = held[row.what] / held[BASE]
    return f"With {share:.2f} of the attention's cache, retrieval changes by {change:+.3f}\nby the ranking{at_random}"


STUDY = WindowsAgainstCache
