"""Retrieval against dictionary size, with and without the gather and the aggregate heads (arXiv 2504.18574, the KV sweep).

The more there is to choose from, the more a head that aggregates is missed. As many heads drawn at random are the control.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from surgery.errors import UserError
from surgery.evaluation.results import value
from surgery.locating.subject import Subject
from surgery.locating.substitution import ablate_heads, skip_layers
from surgery.probes.kv import KVRetrieval
from surgery.probes.scoring import answer
from surgery.records.record import Record
from surgery.records.site import Site, SiteText
from surgery.runtime.progress import Track
from surgery.statistics import Estimate, Proportion, difference, proportion
from surgery.studies.figures import AT_RANDOM, draw_curves
from surgery.studies.prune import heads_of
from surgery.studies.study import Findings, Measurements, OfHeads, Row, Subjects

CONTROL = "as many heads at random"


class KVSweep(OfHeads):
    """pairs: the dictionary sizes. layers: measure in the model of the first `layers` layers. controls: how many random sets of
    equally many heads are removed for comparison. The other options are those of OfHeads."""

    title: ClassVar[str] = "Key-value retrieval with and without the crucial heads"
    published: ClassVar[str] = (
        "Measured from 10 to 50 pairs with 1,000 examples each. (A later paper, arXiv 2602.11374, the other way round: "
        "Llama-3.2-1B with 10 of its 512 heads left as attention has 99.0, with none 13.2, with all 99.4.)"
    )

    pairs: tuple[int, ...] = (10, 20, 30, 40, 50)
    layers: int | None = Field(default=None, ge=1)
    controls: int = Field(default=2, ge=0)

    def measure(self, subjects: Subjects) -> Measurements:
        heads = self.heads(subjects)
        groups = {f"without {', '.join(map(str, sites))} ({role})": sites for role, sites in heads.items() if sites}
        options = subjects.recipe.locate
        curves = kv_sweep(
            subjects.subject, self.pairs, groups, layers=self.layers, controls=self.controls,
            examples=options.examples, batch_size=options.batch_size, seed=subjects.recipe.seed,
        )  # fmt: skip
        size = self.pairs[len(self.pairs) // 2]
        named = "; ".join(f"{curve.what} {curve.accuracy[size].accuracy:.3f}" for curve in curves)
        return Measurements(
            about={str(role): list(map(str, sites)) for role, sites in heads.items()}
            | {CONTROL: [list(map(str, curve.silent)) for curve in curves if curve.what.startswith(CONTROL)]},
            summary=f"At {size} pairs: {named}.",
            rows=tuple(
                Row(what=curve.what, figures={str(size): result for size, result in curve.accuracy.items()}) for curve in curves
            ),
        )

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        size = str(self.pairs[-1])
        told = ", ".join(f"{row.what} {value(row.figures[size]):.2f}" for row in findings.rows if AT_RANDOM not in row.what)
        draw_curves(findings, f"{size} pairs: {told}", path)


class Curve(Record):
    """A model without the heads of `silent`: for every number of pairs its accuracy, and what it lost against the whole model
    on the same dictionaries."""

    what: str
    silent: tuple[SiteText, ...] = ()
    accuracy: dict[int, Proportion]
    drop: dict[int, Estimate]


def kv_sweep(
    subject: Subject,
    sizes: Sequence[int],
    groups: Mapping[str, Collection[Site]],
    *,
    layers: int | None = None,
    controls: int = 2,
    examples: int = 256,
    batch_size: int = 64,
    seed: int = 0,
) -> tuple[Curve, ...]:
    """The whole model; the model without each of the named groups of heads; and, as a control, `controls` times without as many
    heads as the largest group has, drawn from all layers alike, but from no group. layers: measure in a model of the first so
    many (in the minimal model no later layer can stand in for what is lost). Raises UserError for heads that it lacks."""
    if examples < 2:
        raise UserError("a sweep needs at least 2 examples")
    if not groups or not all(groups.values()):
        raise UserError("a sweep needs the heads that are to be ablated")
    anatomy = subject.anatomy
    layers = len(anatomy.blocks) if layers is None else layers
    anatomy.check([Site(layers - 1), *(site for heads in groups.values() for site in heads)])
    silent = {"whole": [], **{what: sorted(heads_of(heads)) for what, heads in groups.items()}}
    taken = {head for heads in silent.values() for head in heads}
    if stray := next((head for head in sorted(taken) if head.layer >= layers), None):
        raise UserError(f"{stray} is not among the first {layers} layers")
    free = [site for site in anatomy.sites() if site not in taken and site.layer < layers]
    most = max(map(len, silent.values()))
    if len(free) < most:
        raise UserError(f"the model has {len(free)} other heads; a control needs {most}")
    for control in range(controls):
        drawn = random.Random(f"sweep {seed} {control}").sample(free, most)
        silent[CONTROL + (f" ({control + 1})" if controls > 1 else "")] = sorted(drawn)

    questions = {size: KVRetrieval(size).questions(examples, seed) for size in sizes}
    curves: list[Curve] = []
    base: dict[int, np.ndarray] = {}
    for what, heads in Track(list(silent.items()), "sweep"):
        accuracy, drop = {}, {}
        with skip_layers(subject, range(layers, len(anatomy.blocks))), ablate_heads(anatomy, heads):
            for size in sizes:
                correct = answer(subject.model, subject.tokenizer, questions[size], batch_size).correct
                whole_correct = base.setdefault(size, correct)
                accuracy[size] = proportion(correct)
                drop[size] = difference(correct, whole_correct)
        curves.append(Curve(what=what, silent=tuple(heads), accuracy=accuracy, drop=drop))
    return tuple(curves)


STUDY = KVSweep
