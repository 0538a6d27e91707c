"""State given back: how small the state of the SSMs can be once attention retrieves (arXiv 2602.11374: 8 times smaller at equal
quality).

For each size the plan's hybrid keeps the dimensions that text needs most (tuning/state_sizes.py), as it is and tuned by the
recipe, its teacher being the whole base. Beside it the base with the same dimensions and no attention shows what retrieval
loses where nothing takes its place.
"""

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.evaluation.bench import measure
from surgery.evaluation.results import value
from surgery.figures import plotting
from surgery.figures.plots import name_lines
from surgery.jobs.locating_stage import located
from surgery.jobs.planning_stage import KEPT, planned
from surgery.jobs.tuning_stage import tuned
from surgery.records.recipe import Recipe
from surgery.records.sections.section import Count
from surgery.splicing.splice import adopt, cut_state, splice
from surgery.splicing.state import state_size
from surgery.studies.study import KNOWLEDGE, TEXT, Findings, Measurements, Row, Study, Subjects, figures_of
from surgery.tuning.state_sizes import shrink_state

BASE, UNTRAINED, TUNED = "base", "grafted, not trained", "tuned"
COLORS = {BASE: plotting.COLORS["base"], UNTRAINED: plotting.COLORS["spliced"], TUNED: plotting.COLORS["tuned"]}


class StateSize(Study):
    """sizes: how many dimensions are kept, beside all. The recipe's `plan` says where attention goes, its `tune` how it is
    tuned, its `bench` what is measured, and at how many tokens (bench.contexts) the cache."""

    title: ClassVar[str] = "Retrieval, text and cache against the size of the state"

    sizes: tuple[Count, ...] = Field(default=(8, 4, 2), min_length=1)

    def check(self, recipe: Recipe) -> None:
        if recipe.plan.state_size is not None or recipe.plan.kind == "layer":
            raise UserError(
                "the study 'state_size' says what is kept beside head grafts: leave out plan.state_size and plan.kind"
            )
        if "quick" not in recipe.bench.suites or not recipe.bench.lengths:
            raise UserError("the study 'state_size' needs bench.suites: [quick], and a length of bench.contexts")

    def measure(self, subjects: Subjects) -> Measurements:
        base, recipe, out = subjects.checkpoint, subjects.recipe, subjects.out
        whole = state_size(base.model)
        chosen = planned(recipe, base, located(recipe, base, out, resume=subjects.resume, figures=False), out / KEPT)
        models: dict[str, PreTrainedModel] = {}
        for size in (whole, *self.sizes):
            kept = chosen if size == whole else shrink_state(
                base, chosen, size, data=recipe.data, text_tokens=recipe.tune.text_tokens, seed=recipe.seed
            )  # fmt: skip
            models[_row(BASE, size)] = base.model if size == whole else cut_state(adopt(base.model), kept.kept_state)
            models[_row(UNTRAINED, size)] = splice(base.model, kept)
            hybrid = models[_row(TUNED, size)] = splice(base.model, kept)
            tuned(
                hybrid, base, recipe, out / "tuning" / str(size), plan=kept, teacher=adopt(base.model), resume=subjects.resume,
                description=_row(TUNED, size),
            )  # fmt: skip
        reports = measure(models, base.tokenizer, recipe.bench, data=recipe.data, seed=recipe.seed, cells=out / "cells")
        rows = tuple(Row(what=name, figures=figures_of(report)) for name, report in reports.items())
        cache = {name: {str(cost.context): cost.cache_bytes for cost in report.cost} for name, report in reports.items()}
        sizes = {"sizes": [whole, *self.sizes], "cache bytes": cache}
        return Measurements(
            about={"sites": [str(site) for site in chosen.sites], **sizes},
            summary="\n".join(summarise(size, {row.what: row.figures for row in rows}, cache, whole) for size in self.sizes),
            rows=rows,
        )

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        """Retrieval from the largest dictionary, text, and cache, against the size."""
        of, sizes = {row.what: row.figures for row in findings.rows}, sorted(findings.about["sizes"])
        largest = [name for name in of[_row(BASE, sizes[-1])] if name.startswith("kv.")][-1]
        columns = {largest: f"{plotting.ACCURACY}", TEXT: plotting.lower("nats per token")}
        held = findings.about["cache bytes"]
        with plotting.drawing(path, 3, 1, width=7.0, height=8.4) as (_, axes):
            ends: list[list[tuple[float, float, str, str]]] = [[], [], []]
            for model, color in COLORS.items():
                for axis, column, names in zip(axes.flat, columns, ends, strict=False):
                    known = [size for size in sizes if column in of[_row(model, size)]]  # the base has no change
                    cells = [of[_row(model, size)][column] for size in known]
                    values = [value(cell) for cell in cells]
                    plotting.draw_line(axis, known, values, [cell.ci95 for cell in cells], color=color)
                    names.append((known[-1], values[-1], model, color))
                for context in held[_row(model, sizes[0])] if model != UNTRAINED else ():
                    kib = [held[_row(model, size)][context] / 2**10 for size in sizes]
                    plotting.draw_line(axes.flat[2], sizes, kib, color=color)
                    ends[2].append((sizes[-1], kib[-1], f"{model}, {int(context):,} token{'s' * (int(context) > 1)}", color))
            guess = 1 / int(largest[3:])
            plotting.draw_chance(axes.flat[0], [sizes[0], sizes[-1]], [guess] * 2)
            ends[0].append((sizes[-1], guess, "chance", plotting.CHANCE))
            labels = (*columns.values(), plotting.lower("KiB"))
            for axis, label, title in zip(axes.flat, labels, _titles(of, held, sizes, largest), strict=True):
                axis.set(xlabel="dimensions of the state (log scale)", ylabel=label, title=title, xscale="log")
                axis.set_xticks(sizes, [str(size) for size in sizes], minor=False)
                axis.set_xticks([], minor=True)
            axes.flat[0].set_ylim(0, 1.02)
            axes.flat[2].set_ylim(bottom=0)
            for axis, names in zip(axes.flat, ends, strict=True):
                name_lines(axis, names)


def _titles(of: dict[str, Any], held: dict[str, Any], sizes: list[int], largest: str) -> tuple[str, str, str]:
    """The result of each panel."""
    least, whole, pairs = sizes[0], sizes[-1], largest.removeprefix("kv.")
    tuned, base = (value(of[_row(model, size)][largest]) for model, size in ((TUNED, least), (BASE, whole)))
    changes = [value(of[_row(TUNED, size)][TEXT]) for size in sizes]
    longest = max(held[_row(TUNED, least)], key=int)
    share = held[_row(TUNED, least)][longest] / held[_row(TUNED, whole)][longest]
    return (
        f"{pairs} pairs: tuned with {least} of {whole} dimensions {tuned:.2f}, the base with all {base:.2f}",
        f"Loss on text: {min(changes):+.4f} to {max(changes):+.4f} nats when tuned",
        f"Cache after {int(longest):,} tokens: {share:.2f} of the whole with {least} dimensions",
    )


def _row(model: str, size: int) -> str:
    return f"{model}, state of {size}"


def summarise(size: int, of: dict[str, dict[str, Any]], cache: dict[str, dict[str, int]], whole: int) -> str:
    """A size in a sentence, compared with the whole state."""
    hybrid, before = of[_row(TUNED, size)], of[_row(TUNED, whole)]
    largest = [name for name in hybrid if name.startswith("kv.")][-1]
    bare = of[_row(BASE, size)]
    held = (
        f"{cut / cache[_row(TUNED, whole)][at]:.2f} after {int(at):,} token{'s' * (int(at) > 1)}"
        for at, cut in cache[_row(TUNED, size)].items()
    )
    return (
        f"A state of {size} of {whole}: {largest.replace('kv.', 'KV ')} {value(hybrid[largest]):.3f} tuned (whole state "
        f"{value(before[largest]):.3f}), base {value(bare[largest]):.3f} (whole {value(of[_row(BASE, whole)][largest]):.3f}); "
        f"knowledge {value(hybrid[KNOWLEDGE]):+.3f} (whole {value(before[KNOWLEDGE]):+.3f}), loss on text "
        f"{value(hybrid[TEXT]):+.4f} nats (whole {value(before[TEXT]):+.4f}); cache, as a share of that with the whole state: "
        f"{' and '.join(held)}."
    )


STUDY = StateSize
