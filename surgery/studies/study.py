"""What every study has in common: the models and probes that it works on, and what it finds."""

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.loading.checkpoint import Checkpoint
from surgery.loading.digests import Conditions
from surgery.locating.locate import locate
from surgery.locating.prune import Outcome, Subject, minimal_model, shorten
from surgery.locating.questions import choice_probe
from surgery.locating.ranking import Ranking, Role, Score
from surgery.probes.knowledge import Knowledge
from surgery.probes.question import Probe
from surgery.records.recipe import Recipe
from surgery.records.record import Provenance, Record, Sealed
from surgery.records.site import Site, SitesText
from surgery.splicing.splice import adopt
from surgery.statistics import Estimate, Proportion


class Row(Record):
    """One line of a study's table: what was measured, and by column the figures."""

    what: str
    figures: dict[str, Proportion | Estimate]


class Found(Record):
    """What a study measured. about: what it was about (layers and heads that were found on the way). summary: a sentence."""

    about: dict[str, Any]
    summary: str
    rows: tuple[Row, ...]


class Findings(Sealed, Found):
    """What a study measured, and where that comes from. conditions: of the recipe's model; other: the digest of a second one
    (versions up to 0.5.1 said neither)."""

    provenance: Provenance
    conditions: Conditions | None = None
    other: str | None = None
    study: str

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and body; a column that a row lacks stays empty."""
        columns = list(dict.fromkeys(column for row in self.rows for column in row.figures))
        body = [[row.what, *(str(row.figures.get(column, "")) for column in columns)] for row in self.rows]
        return ["", *columns], body


class Study(Record):
    """A study's options. title: for its figure. published: what the paper reports, for the page that compares, if it
    does."""

    title: ClassVar[str]
    published: ClassVar[str] = ""

    def check(self, recipe: Recipe) -> None:
        """Raise UserError for options that do not fit the recipe."""

    def measure(self, subjects: "Subjects") -> Found:
        """Do it."""
        raise NotImplementedError

    def draw(self, findings: Findings, path: Path, subjects: "Subjects") -> None:
        """Its figure."""
        raise NotImplementedError


class Subjects:
    """The model of a recipe, a second one if the study has any, and the probes. out: where a long study keeps what it has
    measured; resume: and finds it again."""

    def __init__(
        self, recipe: Recipe, checkpoint: Checkpoint, out: Path, *, other: Checkpoint | None = None, resume: bool = False
    ):
        self.recipe, self.checkpoint, self.other = recipe, checkpoint, other
        self.out, self.resume = out, resume
        self.model: PreTrainedModel = adopt(checkpoint.model).eval()
        self.tokenizer: PreTrainedTokenizerBase = checkpoint.tokenizer

    @property
    def retrieval(self) -> Probe:
        return choice_probe(self.tokenizer, self.recipe.locate.probe, self.recipe.locate.options)

    @property
    def knowledge(self) -> Probe:
        return Knowledge(self.recipe.data.facts)

    @cached_property
    def subject(self) -> Subject:
        """The model and the questions of both probes."""
        options = self.recipe.locate
        return Subject(
            self.model, self.tokenizer, self.retrieval, self.knowledge, examples=options.examples,
            batch_size=options.batch_size, seed=self.recipe.seed,
        )  # fmt: skip

    @cached_property
    def ranking(self) -> Ranking:
        """Of the model's heads."""
        return self.rank(self.checkpoint)

    def rank(self, checkpoint: Checkpoint) -> Ranking:
        return locate(
            checkpoint.model, checkpoint.tokenizer, **self.recipe.locate.model_dump(), seed=self.recipe.seed,
            name=checkpoint.name, recipe=self.recipe.model_dump(mode="json"),
        )  # fmt: skip

    def minimal_model(self, layers: int | None, holding: Collection[Site] = ()) -> tuple[int, Outcome]:
        """The model of the first so many layers (if that is not said, of as many as retrieval needs), and of those that hold
        the given heads: its number of layers, and what it can do."""
        subject = self.subject
        layers = layers or minimal_model(subject, shorten(subject))
        layers = max(layers, *(site.layer + 1 for site in holding), 1)
        return layers, subject.cut("minimal model", dropped=range(layers, len(subject.anatomy.blocks)))


class OfHeads(Study):
    """gather, aggregate: the heads; if they are not given, the `top` of each role whose ablation costs most."""

    gather: SitesText | None = None
    aggregate: SitesText | None = None
    top: int = Field(default=1, ge=1)

    def heads(self, subjects: Subjects) -> dict[Role, tuple[Site, ...]]:
        """By role. Raises UserError if there are none at all."""
        named: dict[Role, tuple[Site, ...] | None] = {"gather": self.gather, "aggregate": self.aggregate}
        found = {
            role: tuple(score.site for score in leading(subjects.ranking, role, self.top)) if sites is None else sites
            for role, sites in named.items()
        }
        if not any(found.values()):
            raise UserError("locate gave no head a role; name them with study.gather and study.aggregate")
        return found


def leading(ranking: Ranking, role: Role, top: int = 1) -> list[Score]:
    """The heads of a role whose ablation costs most."""
    having = [score for score in ranking.heads if score.role == role and score.ablation_loss is not None]
    return sorted(having, key=lambda score: -score.ablation_loss.value)[:top]  # type: ignore[union-attr]


def rows(outcomes: Sequence[Outcome]) -> tuple[Row, ...]:
    """Both probes of every cut."""
    return tuple(
        Row(what=o.what, figures={"retrieval": o.retrieval.accuracy, "knowledge": o.knowledge.accuracy}) for o in outcomes
    )


def change(before: Outcome, after: Outcome) -> str:
    """What a cut does to both probes, for a sentence."""
    return ", ".join(
        f"{probe} {getattr(before, probe).accuracy.accuracy:.3f} to {getattr(after, probe).accuracy.accuracy:.3f}"
        for probe in ("retrieval", "knowledge")
    )
