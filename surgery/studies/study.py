"""What every study has in common: the models and probes that it works on, and what it finds."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.checkpoint import Checkpoint
from surgery.locate import Ranking, locate
from surgery.locate.prune import Outcome, Subject
from surgery.locate.questions import choice_probe
from surgery.probes.knowledge import Knowledge
from surgery.probes.question import Probe
from surgery.recipe import Recipe
from surgery.records import Provenance, Record
from surgery.site import Site
from surgery.splice import adopt
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


class Findings(Found):
    """What a study measured, and where that comes from."""

    provenance: Provenance
    study: str

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and body; a column that a row lacks stays empty."""
        columns = list(dict.fromkeys(column for row in self.rows for column in row.figures))
        body = [[row.what, *(str(row.figures.get(column, "")) for column in columns)] for row in self.rows]
        return ["", *columns], body


class Study(Record):
    """A study's options. title: for its figure. published: what the paper reports, for the page that compares."""

    title: ClassVar[str]
    published: ClassVar[str]

    def measure(self, subjects: "Subjects") -> Found:
        """Do it."""
        raise NotImplementedError

    def draw(self, findings: Findings, path: Path, subjects: "Subjects") -> None:
        """Its figure."""
        raise NotImplementedError


class Subjects:
    """The model of a recipe, a second one if the study has any, and the probes."""

    def __init__(self, recipe: Recipe, checkpoint: Checkpoint, other: Checkpoint | None = None):
        self.recipe, self.checkpoint, self.other = recipe, checkpoint, other
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
        return self.subject_of(self.model)

    def subject_of(self, model: PreTrainedModel) -> Subject:
        options = self.recipe.locate
        return Subject(
            model, self.tokenizer, self.retrieval, self.knowledge, examples=options.examples, batch_size=options.batch_size,
            seed=self.recipe.seed,
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

    def heads(self, role: str, named: tuple[Site, ...] | None, top: int) -> tuple[Site, ...]:
        """The named heads, or the `top` leading ones of a role: by what ablating them costs, as in the paper."""
        if named is not None:
            return named
        having = [score for score in self.ranking.heads if score.role == role and score.ablation_loss is not None]
        having.sort(key=lambda score: -score.ablation_loss.value)  # type: ignore[union-attr]
        return tuple(score.site for score in having[:top])


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
