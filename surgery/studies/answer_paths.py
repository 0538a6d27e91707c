"""Answer paths: where an answer travels, where it is lost, and at which heads a perfect choice would bring it back.

Heads are chosen on some questions, and what they are worth is measured on others. The recipe's `locate` says what is asked and
how many questions choose, its `bench.limit` how many measure.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from surgery.errors import UserError
from surgery.evaluation.results import value
from surgery.locating.oracles import OracleHead, OracleOutcome, Oracles, plan_at
from surgery.locating.questions import choice_probe
from surgery.locating.walk import fully_gated
from surgery.probes.scoring import answer
from surgery.runtime import plotting
from surgery.splicing.splice import install
from surgery.statistics import mean, proportion
from surgery.studies.paths import PARTS, Travelled, travel
from surgery.studies.study import Findings, Measurements, Row, Study, Subjects

WHOLE, ALONE, PERFECT, GRAFTED = "as it is", "each span read alone", "perfect choice at ", "dual grafts there, untrained"
ACCURACY, LOSS = "accuracy", "loss, nats"
SHOWN = 0.05  # of what the exchange costs; heads with less at every part are not listed


class AnswerPaths(Study):
    """most: perfect choices at so many heads at most, one added after the other. candidates: of so many heads, those that are
    best alone. worth: nats that a further head has to save."""

    title: ClassVar[str] = "Where the answer travels, and what would bring it back"

    most: int = Field(default=4, ge=1)
    candidates: int = Field(default=8, ge=1)
    worth: float = Field(default=0.02, ge=0, allow_inf_nan=False)

    def measure(self, subjects: Subjects) -> Measurements:
        recipe, subject = subjects.recipe, subjects.subject
        if not subject.graftable:
            raise UserError("the study 'answer_paths' needs a base that can be grafted")
        probe, size = choice_probe(subject.tokenizer, recipe.locate.probe, recipe.locate.options), recipe.locate.batch_size
        choosing = probe.questions(recipe.locate.examples, recipe.seed)
        asked = probe.questions(recipe.bench.limit, recipe.seed + 1)
        travelled = travel(subject, choosing, batch_size=size, seed=recipe.seed)
        gated = fully_gated(subject)
        first = Oracles(gated, choosing, size)
        chosen = [carrier for carrier, _ in first.carriers(self.most, candidates=self.candidates, worth=self.worth)]
        oracles = Oracles(gated, asked, size)
        rows = [_row(WHOLE, oracles.outcome()), _row(ALONE, oracles.outcome(alone=True))]
        for count in range(1, len(chosen) + 1):
            rows.append(_row(PERFECT + _names(chosen[:count]), oracles.outcome(chosen[:count])))
        if chosen:
            rows.append(_row(f"{PERFECT}{_names(chosen)}, {ALONE}", oracles.outcome(chosen, alone=True)))
            grafted = answer(install(subject.model, plan_at(chosen)).eval(), subject.tokenizer, asked, size)
            rows.append(_row(GRAFTED, OracleOutcome(grafted.loss, grafted.correct)))
        return Measurements(
            about={
                "carriers": [str(carrier) for carrier in chosen],
                "alone": {str(carrier): float(outcome.correct.mean()) for carrier, outcome in first.alone.items()},
                "travels": _travels(travelled),
            },
            summary=_summary(rows, chosen),
            rows=tuple(rows),
        )

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        """A map of heads and parts of the prompt, and below it a bar for every oracle."""
        travels = findings.about["travels"]
        height = 1.6 + 0.26 * len(travels) + 0.4 * len(findings.rows)
        ratios = {"height_ratios": [1 + 0.26 * len(travels), 1 + 0.4 * len(findings.rows)]}
        with plotting.drawing(path, 2, 1, height=height, width=7.4, gridspec_kw=ratios) as (figure, axes):
            upper, lower = axes[:, 0]
            shares = np.array([[parts[part] for part in PARTS] for parts in travels.values()]).reshape(-1, len(PARTS))
            image = upper.imshow(shares, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
            upper.set_xticks(range(len(PARTS)), [part.replace(" ", "\n", 1) for part in PARTS])
            upper.set_yticks(range(len(travels)), list(travels))
            upper.set_title("Share of the answer that is lost where a head is exchanged")
            figure.colorbar(image, ax=upper)
            accuracies = [row.figures[ACCURACY] for row in findings.rows]
            lengths = [value(accuracy) for accuracy in accuracies]
            errors = [[length - a.ci95[0] for length, a in zip(lengths, accuracies, strict=True)],
                      [a.ci95[1] - length for length, a in zip(lengths, accuracies, strict=True)]]  # fmt: skip
            lower.barh(range(len(lengths)), lengths, 0.6, xerr=errors, color="#0072B2", error_kw={"lw": 1, "capsize": 2})
            lower.set_yticks(range(len(lengths)), [row.what for row in findings.rows])
            lower.invert_yaxis()
            lower.set(xlabel=plotting.ACCURACY, xlim=(0, 1.02))
            figure.suptitle(self.title, fontsize=11, fontweight="bold", ha="left", x=0.01)


def _names(carriers: Sequence[OracleHead]) -> str:
    return ", ".join(str(carrier.site) for carrier in carriers)


def _row(what: str, outcome: OracleOutcome) -> Row:
    return Row(what=what, figures={ACCURACY: proportion(outcome.correct), LOSS: mean(outcome.loss)})


def _travels(travelled: Travelled) -> dict[str, dict[str, float]]:
    """Of the heads that matter somewhere, the share of the answer that is lost at each part."""
    shares = travelled.share()
    listed = np.flatnonzero(np.abs(shares).max(0) >= SHOWN).tolist()
    return {
        str(travelled.sites[i]): {part: round(float(shares[p, i]), 4) for p, part in enumerate(PARTS)} for i in listed
    }  # fmt: skip


def _summary(rows: Sequence[Row], chosen: Sequence[OracleHead]) -> str:
    of = {row.what: value(row.figures[ACCURACY]) for row in rows}
    told = f"As it is {of[WHOLE]:.3f}; each span read alone {of[ALONE]:.3f}"
    if not chosen:
        return f"{told}. At no head does a perfect choice save anything."
    perfect = PERFECT + _names(chosen)
    return (
        f"{told}; {perfect} {of[perfect]:.3f}, both {of[f'{perfect}, {ALONE}']:.3f}; dual grafts at these heads, untrained, "
        f"{of[GRAFTED]:.3f}."
    )


STUDY = AnswerPaths
