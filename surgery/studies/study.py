"""What all studies have in common: their options, their subjects (models and probes) and their findings."""

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from surgery.errors import UserError
from surgery.evaluation.results import ModelReport
from surgery.loading.digests import Conditions
from surgery.loading.opened import Checkpoint
from surgery.locating.heads import Role, Score
from surgery.locating.locate import rank
from surgery.locating.ranking import Ranking
from surgery.locating.subject import Subject
from surgery.probes.knowledge import Knowledge
from surgery.records.recipe import Recipe
from surgery.records.record import Provenance, Record, Sealed
from surgery.records.site import Site, SitesText
from surgery.statistics import Estimate, Proportion
from surgery.studies.prune import PruneOutcome, Pruner, minimal_model, shorten

# What a model costs: columns of a row, and what a report calls each.
KNOWLEDGE, TEXT = "knowledge, change", "loss on text, change in nats"
CHANGES = {KNOWLEDGE: "knowledge", TEXT: "perplexity"}


class Row(Record):
    """One row of a study's table. what: what was measured. figures: column -> figure."""

    what: str
    figures: dict[str, Proportion | Estimate]


class Measurements(Record):
    """What a study measured. about: the layers and heads that it determined on the way. summary: a sentence."""

    about: dict[str, Any]
    summary: str
    rows: tuple[Row, ...]


class Findings(Sealed, Measurements):
    """The measurements of a study and their provenance.

    conditions: of the recipe's model. other: the digest of the second model. The records of the paper's
    figures, of version 0.4, have neither."""

    provenance: Provenance
    conditions: Conditions | None = None
    other: str | None = None
    study: str


class Study(Record):
    """The options of a study. title: of its figure. published: what the paper reports, where there is something to compare.
    draws_models: whether its figure needs the models, and not the findings alone."""

    title: ClassVar[str]
    published: ClassVar[str] = ""
    draws_models: ClassVar[bool] = False

    def check(self, recipe: Recipe) -> None:
        """Raise UserError for options that do not fit the recipe."""

    def measure(self, subjects: "Subjects") -> Measurements:
        """Take the measurements."""
        raise NotImplementedError

    @staticmethod
    def table(findings: Findings) -> tuple[list[str], list[list[str]]]:
        """Header and body of what people read of the findings: all of them, where they fit a page. A column that a row lacks
        stays empty."""
        columns = list(dict.fromkeys(column for row in findings.rows for column in row.figures))
        body = [[row.what, *(str(row.figures.get(column, "")) for column in columns)] for row in findings.rows]
        return ["", *columns], body

    def draw(self, findings: Findings, path: Path, subjects: "Subjects | None") -> None:
        """Draw the figure of the study. subjects: may be None unless `draws_models`."""
        raise NotImplementedError


class Subjects:
    """What a study works on: the model of a recipe, the second model where there is one, and the probes.

    out: the folder where a long study keeps what it has measured. resume: whether it reuses what is there."""

    def __init__(
        self, recipe: Recipe, checkpoint: Checkpoint, out: Path, *, other: Checkpoint | None = None, resume: bool = False
    ):
        self.recipe, self.checkpoint, self.other = recipe, checkpoint, other
        self.out, self.resume = out, resume
        self.subject = Subject.of(checkpoint, known_fingerprint=checkpoint.fingerprint)

    @cached_property
    def pruner(self) -> Pruner:
        """Cuts the recipe's model."""
        return Pruner(self.subject, self.recipe.locate, Knowledge(self.recipe.data.facts), self.recipe.seed)

    @cached_property
    def ranking(self) -> Ranking:
        """The ranking of the model's heads."""
        return self.rank(self.subject)

    def rank(self, subject: Subject) -> Ranking:
        """Of another model's heads."""
        options = self.recipe.locate
        if options.exact is None:  # roles need ablations, however long they take
            options = options.model_copy(update={"exact": True})
        return rank(subject, options, data=self.recipe.data, seed=self.recipe.seed, recipe=self.recipe.model_dump(mode="json"))

    def minimal_model(self, layers: int | None, holding: Collection[Site] = ()) -> tuple[int, PruneOutcome]:
        """The minimal model: its number of layers, and its accuracy on both probes.

        layers: how many; None for as many as retrieval needs. holding: heads that have to be in it, however few that were."""
        pruner = self.pruner
        layers = layers or minimal_model(pruner, shorten(pruner))
        layers = max(layers, *(site.layer + 1 for site in holding), 1)
        return layers, pruner.cut("minimal model", dropped=range(layers, len(self.subject.anatomy.blocks)))


class OfHeads(Study):
    """gather, aggregate: the heads of each role. By default those `top` heads of the role whose ablation costs most."""

    gather: SitesText | None = None
    aggregate: SitesText | None = None
    top: int = Field(default=1, ge=1)

    def heads(self, subjects: Subjects) -> dict[Role, tuple[Site, ...]]:
        """The heads of each role. Raises UserError if neither role has any."""
        named: dict[Role, tuple[Site, ...] | None] = {"gather": self.gather, "aggregate": self.aggregate}
        heads = {
            role: tuple(score.site for score in leading(subjects.ranking, role, self.top)) if sites is None else sites
            for role, sites in named.items()
        }
        if not any(heads.values()):
            raise UserError("locate gave no head a role; name the heads with study.gather and study.aggregate")
        return heads


def leading(ranking: Ranking, role: Role, top: int = 1) -> list[Score]:
    """The heads of a role whose ablation costs most."""
    scores = (ranking.columns[i] for i in ranking.columns.with_role(role))
    ablated = [score for score in scores if score.ablation_loss is not None]
    return sorted(ablated, key=lambda score: -score.ablation_loss.value)[:top]


def figures_of(report: ModelReport) -> dict[str, Proportion | Estimate]:
    """The columns of a row. The base has no changes, since it is what the others are compared with."""
    changes = {column: report.change[name] for column, name in CHANGES.items() if name in report.change}
    return {f"kv.{size}": accuracy for size, accuracy in report.kv.items()} | changes


def rows(outcomes: Sequence[PruneOutcome]) -> tuple[Row, ...]:
    """A row for every cut, with the accuracy on both probes."""
    return tuple(
        Row(what=o.what, figures={"retrieval": o.retrieval.accuracy, "knowledge": o.knowledge.accuracy}) for o in outcomes
    )


def change(before: PruneOutcome, after: PruneOutcome) -> str:
    """What a cut does to the accuracy on both probes, as a part of a sentence."""
    return ", ".join(
        f"{probe} {getattr(before, probe).accuracy.accuracy:.3f} to {getattr(after, probe).accuracy.accuracy:.3f}"
        for probe in ("retrieval", "knowledge")
    )
