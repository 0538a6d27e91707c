"""Where retrieval lives: what is lost without all heads of a kind, all convolutions, the mixers of single layers, and the heads
whose ablation costs most.

Any part may be needed for something else: without the SSMs of a hybrid it writes no text. So each ablation is measured on text,
too, at its beginning and behind it. What costs text more than `needed` is what every token needs, and no place of retrieval; a
single head that costs the beginning so much is a state sink (arXiv 2606.00930), and no gatherer.

Whether grafts can help at all is measured as well, before any is tuned: with a perfect choice (more/oracles.py) at the SSM
heads that it helps most, which are chosen on other questions.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import nn

from surgery.errors import UserError
from surgery.evaluation.results import value
from surgery.figures import plotting
from surgery.locating.substitution import ablate_heads
from surgery.locating.walk import fully_gated
from surgery.models.anatomy import Anatomy, Kind
from surgery.more.oracles import Oracles
from surgery.probes.perplexity import TextWindows, token_losses
from surgery.records.recipe import Recipe
from surgery.records.site import Site
from surgery.runtime.progress import Track
from surgery.statistics import difference, proportion
from surgery.studies.study import Findings, Measurements, Row, Study, Subjects

WHOLE, CONVOLUTIONS, BOUND = "whole", "all short convolutions", "perfect choice at "
NAMES: dict[Kind, str] = {"ssm": "SSM", "attention": "attention"}
RETRIEVAL, TEXT, BEGINNING = "retrieval", "rise of the loss on text, nats", "rise at its beginning, nats"
SHARE, PART = 0.5, 0.1  # of what the model has above chance: what takes so much with it holds retrieval, or a part of it
MOST_SHOWN = 1.0  # nats


class Part(NamedTuple):
    """What is ablated. head: whether it is a single one."""

    what: str
    heads: Sequence[Site] = ()
    convolutions: bool = False
    head: bool = False


class RetrievalByKind(Study):
    """heads: how many single heads are ablated, those whose ablation costs most. beginning: tokens of a text. needed: nats from
    which on a part is needed for text. most: perfect choices at so many heads at most."""

    title: ClassVar[str] = "Where retrieval lives"

    heads: int = Field(default=4, ge=0)
    beginning: int = Field(default=16, ge=2)
    needed: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    most: int = Field(default=2, ge=1)

    def check(self, recipe: Recipe) -> None:
        if self.beginning >= recipe.bench.window:
            raise UserError(f"study.beginning: a window of text has {recipe.bench.window} tokens (bench.window)")

    def measure(self, subjects: Subjects) -> Measurements:
        subject, recipe, pruner = subjects.subject, subjects.recipe, subjects.pruner
        text = TextWindows(recipe.data.held_out_text, recipe.bench.windows, recipe.bench.window)
        windows = text.token_windows(subject.tokenizer, recipe.seed).to(subject.model.device)

        def losses() -> tuple[np.ndarray, np.ndarray]:
            """Of every window, behind its beginning and in it."""
            each = torch.cat([token_losses(subject.model, ids) for ids in windows.split(16)]).cpu().numpy()
            return each[:, self.beginning - 1 :].mean(1), each[:, : self.beginning - 1].mean(1)

        whole = losses()
        chance = float(np.mean([question.chance for question in pruner.questions["retrieval"]]))
        above = pruner.base.retrieval.accuracy.accuracy - chance
        if above <= 0:
            raise UserError("the model is at chance on these questions; choose easier ones (locate.options)")
        rows = [Row(what=WHOLE, figures={RETRIEVAL: pruner.base.retrieval.accuracy})]
        told: dict[str, dict[str, Any]] = {}
        for part in Track(self._parts(subjects), "ablating"):
            with ExitStack() as stack:
                if part.convolutions:
                    stack.enter_context(without_convolutions(subject.anatomy))
                cut = pruner.cut(part.what, silent=part.heads)
                stack.enter_context(ablate_heads(subject.anatomy, part.heads))
                rest, first = (difference(before, now) for before, now in zip(whole, losses(), strict=True))
            rows.append(Row(what=part.what, figures={RETRIEVAL: cut.retrieval.accuracy, TEXT: rest, BEGINNING: first}))
            share = value(cut.retrieval.drop) / above
            told[part.what] = {"share": round(share, 4), "is": self.name(share, rest.ci95[0], first.ci95[0], part.head)}
        bound = self._bound(subjects)
        return Measurements(about={"parts": told, **bound}, summary=_summary(told, bound, above + chance), rows=tuple(rows))

    def name(self, share: float, rest: float, first: float, head: bool) -> str:
        """What a part is. share: of retrieval that is lost without it. rest, first: what text surely loses without it."""
        if head and first >= self.needed:
            return "a sink"
        if max(rest, first) >= self.needed:
            return "needed for text"
        return "holds retrieval" if share >= SHARE else "holds a part" if share >= PART else "not needed"

    def _parts(self, subjects: Subjects) -> list[Part]:
        anatomy = subjects.subject.anatomy
        of_kind: dict[Kind, list[Part]] = {"ssm": [], "attention": []}
        for mixer in anatomy.mixers:
            sites = [Site(mixer.layer, (mixer.first + head,)) for head in range(mixer.heads)]
            of_kind[mixer.kind].append(Part(f"{NAMES[mixer.kind]} of L{mixer.layer}", sites))
        parts = [
            Part(f"all {NAMES[kind]} heads", [site for part in each for site in part.heads])
            for kind, each in of_kind.items() if each
        ]  # fmt: skip
        if convolutions(anatomy):
            parts.append(Part(CONVOLUTIONS, convolutions=True))
        losses = {score.site: score.ablation_loss.value for score in subjects.ranking.heads if score.ablation_loss is not None}
        costliest = sorted(losses, key=lambda site: -losses[site])[: self.heads]
        return [*parts, *of_kind["attention"], *of_kind["ssm"], *(Part(str(site), [site], head=True) for site in costliest)]

    def _bound(self, subjects: Subjects) -> dict[str, Any]:
        """What a perfect choice at SSM heads gives, on questions on which they were not chosen, and without it on the same."""
        subject, recipe = subjects.subject, subjects.recipe
        if not subject.graftable:
            return {"bound": None, "why": f"this {subject.model.config.model_type} takes no grafts, or has some"}
        questions = subjects.pruner.questions["retrieval"]
        gated, size, half = fully_gated(subject), recipe.locate.batch_size, len(questions) // 2
        try:
            chosen = [carrier for carrier, _ in Oracles(gated, questions[:half], size).carriers(self.most)]
            other = Oracles(gated, questions[half:], size)
        except UserError as error:
            return {"bound": None, "why": str(error)}
        plain, perfect = (proportion(other.outcome(carriers).correct) for carriers in ((), chosen))
        return {"bound": perfect.accuracy, "without": plain.accuracy, "at": [str(carrier.site) for carrier in chosen]}

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        """What is lost without each part, of retrieval and of text."""
        parts = findings.about["parts"]
        colors = {"holds retrieval": "#0072B2", "holds a part": "#56B4E9", "not needed": plotting.OTHERS}
        rises = [max(value(row.figures[TEXT]), value(row.figures[BEGINNING])) for row in findings.rows if TEXT in row.figures]
        places = range(len(parts))
        with plotting.drawing(path, 1, 2, height=1.4 + 0.3 * len(parts), width=9, sharey=True) as (figure, axes):
            left, right = axes[0]
            shown = [colors.get(part["is"], "#D55E00") for part in parts.values()]
            left.barh(places, [part["share"] for part in parts.values()], 0.6, color=shown)
            left.set_yticks(places, [f"{what}: {part['is']}" for what, part in parts.items()])
            left.invert_yaxis()
            left.set(xlabel="share of retrieval that is lost", xlim=(min(0, *(part["share"] for part in parts.values())), 1.05))
            right.barh(places, np.minimum(rises, MOST_SHOWN), 0.6, color=shown)
            right.axvline(self.needed, color=plotting.CHANCE, lw=1.6, ls=(0, (1, 1.5)))
            right.set(
                xlabel=f"rise of the loss on text, nats ({MOST_SHOWN:g}: or more)", xlim=(min(0, *rises), 1.05 * MOST_SHOWN)
            )
            holding = [what for what, part in parts.items() if part["is"] == "holds retrieval"]
            title = f"Retrieval is lost and text is kept without: {' or '.join(holding) or 'none of these parts'}"
            figure.suptitle(title, fontsize=11, fontweight="bold", ha="left", x=0.01)


def convolutions(anatomy: Anatomy) -> list[nn.Conv1d]:
    """The short convolutions of all mixers."""
    return [module for mixer in anatomy.mixers for module in mixer.module.modules() if isinstance(module, nn.Conv1d)]


@contextmanager
def without_convolutions(anatomy: Anatomy) -> Iterator[None]:
    """Each of their taps but the last at zero: every token stands for itself."""
    own = {conv: conv.weight.data for conv in convolutions(anatomy)}
    try:
        for conv, weight in own.items():
            conv.weight.data = torch.cat([torch.zeros_like(weight[..., :-1]), weight[..., -1:]], -1)
        yield
    finally:
        for conv, weight in own.items():
            conv.weight.data = weight


def _summary(told: dict[str, dict[str, Any]], bound: dict[str, Any], accuracy: float) -> str:
    shares = [f"{what} {part['share']:.0%} ({part['is']})" for what, part in told.items()]
    if bound["bound"] is None:
        grafts = f"What grafts could give is not measured: {bound['why']}"
    elif not bound["at"]:
        grafts = "A perfect choice would save nothing at any SSM head: grafting will not help"
    else:
        heads = ", ".join(bound["at"])
        grafts = f"A perfect choice at {heads} would raise retrieval from {bound['without']:.3f} to {bound['bound']:.3f}"
    return f"Share of retrieval ({accuracy:.3f}) that is lost without {'; '.join(shares)}. {grafts}."


STUDY = RetrievalByKind
