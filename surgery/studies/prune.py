"""How little of a model is enough for retrieval, and what else that little can do (arXiv 2504.18574, sections 3 and 4).

Each cut is measured on a retrieval probe and on a knowledge probe; where the first collapses and the second does not, the cut
removed retrieval alone.

1. Layers are dropped from the end until retrieval collapses. What was left before that is the *minimal model*.
2. From the minimal model every layer is left out in turn.
3. In the layers of given gather and aggregate heads, only those are kept, only the gather heads, only the aggregate heads, or
   none.
4. In a hybrid: who aggregates, attention or SSM? The paper masks the last row of every attention matrix, so that the query
   position draws on no other position. Here the output of all mixers of one kind is set to zero at each row's last position,
   which also removes what that position draws from itself; the residual stream, the MLPs and the other kind stay. This works
   for attention and SSMs alike: a row of an SSM cannot be masked without masking its state. A candidate of several tokens is
   scored in rows of its own, each without mixing at its own last position.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.locating.questions import choice_probe
from surgery.locating.subject import Subject
from surgery.locating.substitution import ablate_heads, skip_layers
from surgery.models.anatomy import Kind
from surgery.models.finite import explained
from surgery.probes.encoded import padded
from surgery.probes.question import Probe, Question
from surgery.probes.scoring import Result, answer, batches
from surgery.records.recipe import Locate
from surgery.records.record import Provenance, Record, provenance
from surgery.records.site import Site, SiteText
from surgery.runtime.progress import Track
from surgery.statistics import Estimate, Proportion, difference, mean, proportion

COLLAPSE = 0.5  # of what the whole model has above chance


class PruneMeasurement(Record):
    """A probe's accuracy and loss (nats), and the accuracy lost against the whole model on the same examples."""

    accuracy: Proportion
    loss: Estimate
    drop: Estimate


class PruneOutcome(Record):
    """A cut and what is left. dropped: layers without mixer and MLP. silent: heads at zero, everywhere or (last_only) at each
    row's last position. replaced: layers that come from a donor (replacement.py)."""

    what: str
    dropped: tuple[int, ...] = ()
    silent: tuple[SiteText, ...] = ()
    last_only: bool = False
    replaced: tuple[int, ...] = ()
    retrieval: PruneMeasurement
    knowledge: PruneMeasurement


class Pruning(Record):
    """base: the whole model. shortened: one layer less each time, until the last one collapsed. minimal: how many layers the
    minimal model has. left_out: it without each of its layers, in order. kept: "both", "gather", "aggregate", "neither" are
    kept, if heads were given. last_row: by the kind whose mixing is missing there, in a hybrid."""

    provenance: Provenance
    probes: dict[str, Any]
    kinds: str
    base: PruneOutcome
    shortened: tuple[PruneOutcome, ...]
    minimal: int
    left_out: tuple[PruneOutcome, ...]
    kept: dict[str, PruneOutcome] = {}
    last_row: dict[Kind, PruneOutcome] = {}


class Pruner:
    """Cuts a subject, and asks it the same questions after every cut.

    options: of them the probe of retrieval with its options, examples and batch_size count. knowledge: the other probe.
    """

    def __init__(self, subject: Subject, options: Locate, knowledge: Probe, seed: int = 0):
        self.subject, self.batch_size = subject, options.batch_size
        probes = {"retrieval": choice_probe(subject.tokenizer, options.probe, options.options), "knowledge": knowledge}
        self.probes: dict[str, Any] = {name: repr(probe) for name, probe in probes.items()}
        self.probes |= {"examples": options.examples, "seed": seed}
        self.questions = {name: probe.questions(options.examples, seed) for name, probe in probes.items()}
        self.whole: dict[str, Result] = {}
        self.base = self.cut("whole")

    def cut(
        self, what: str, *, dropped: Collection[int] = (), silent: Collection[Site] = (), last_only: bool = False
    ) -> PruneOutcome:
        """Measure the model without layers and with silent heads."""
        anatomy = self.subject.anatomy
        anatomy.check([*(Site(layer) for layer in dropped), *silent])
        silent = sorted(head for site in silent for head in (site.each() or self.heads(site.layer)))
        with ExitStack() as stack:
            stack.enter_context(skip_layers(self.subject, dropped))
            if not last_only:
                stack.enter_context(ablate_heads(anatomy, silent))
                measured = self.ask(self.subject.model)
            else:
                measured = self._measured(lambda questions: self._answer_without_last_row(questions, silent))
        return PruneOutcome(
            what=what, dropped=tuple(sorted(dropped)), silent=tuple(silent), last_only=last_only,
            retrieval=measured["retrieval"], knowledge=measured["knowledge"],
        )  # fmt: skip

    def ask(self, model: PreTrainedModel) -> dict[str, PruneMeasurement]:
        """Measure another model (or this one as it now is) on the same questions."""
        return self._measured(lambda questions: answer(model, self.subject.tokenizer, questions, self.batch_size))

    def _measured(self, ask: Callable[[Sequence[Question]], Result]) -> dict[str, PruneMeasurement]:
        measured = {}
        for name, questions in self.questions.items():
            result = ask(questions)
            whole = self.whole.setdefault(name, result)
            drop = difference(result.correct, whole.correct)
            measured[name] = PruneMeasurement(accuracy=proportion(result.correct), loss=mean(result.loss), drop=drop)
        return measured

    def collapsed(self, outcome: PruneOutcome) -> bool:
        """Whether retrieval has lost COLLAPSE of what the whole model has above chance."""
        chance = float(np.mean([question.chance for question in self.questions["retrieval"]]))
        whole = self.base.retrieval.accuracy.accuracy
        return outcome.retrieval.accuracy.accuracy < chance + (1 - COLLAPSE) * (whole - chance)

    def heads(self, layer: int) -> list[Site]:
        """All heads of a layer."""
        return [Site(layer, (head,)) for head in range(self.subject.anatomy.heads(layer))]

    @torch.inference_mode()
    def _answer_without_last_row(self, questions: Sequence[Question], silent: Collection[Site]) -> Result:
        model = self.subject.model
        correct, loss = np.zeros(len(questions), dtype=bool), np.zeros(len(questions))
        for chosen, encoded in batches(self.subject.tokenizer, questions, self.batch_size):
            ids, last = padded(encoded.rows, model.device)
            at = torch.arange(len(ids), device=ids.device), last
            keep, where = last.unique(return_inverse=True)
            with ablate_heads(self.subject.anatomy, silent, at):
                logits = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[at[0], where]
            with explained(model, encoded.rows):
                correct[chosen] = encoded.correct(logits).cpu().numpy()
                loss[chosen] = encoded.losses(logits).cpu().numpy()
        return Result(correct, loss)


def prune(
    subject: Subject,
    options: Locate,
    knowledge: Probe,
    *,
    gather: Collection[Site] = (),
    aggregate: Collection[Site] = (),
    seed: int = 0,
    recipe: dict[str, Any] | None = None,
) -> Pruning:
    """Make all the cuts that apply to a model. options, knowledge: as for Pruner. gather, aggregate: the critical heads, if
    they are known."""
    pruner = Pruner(subject, options, knowledge, seed)
    shortened = shorten(pruner)
    minimal = minimal_model(pruner, shortened)
    return Pruning(
        provenance=provenance(subject.name, subject.fingerprint, seed, recipe),
        probes=pruner.probes,
        kinds=subject.anatomy.kinds(),
        base=pruner.base,
        shortened=shortened,
        minimal=minimal,
        left_out=leave_one_out(pruner, minimal),
        kept=keep_only(pruner, gather, aggregate, minimal) if gather or aggregate else {},
        last_row=last_rows(pruner),
    )


def shorten(pruner: Pruner) -> tuple[PruneOutcome, ...]:
    """Drop one layer after the other from the end, until retrieval collapses."""
    layers, outcomes = len(pruner.subject.anatomy.blocks), []
    if pruner.collapsed(pruner.base):
        raise UserError("the model does not retrieve: it is at chance before any layer is dropped")
    for left in Track(range(layers - 1, -1, -1), "dropping layers"):
        outcomes.append(pruner.cut(f"first {left} layers", dropped=range(left, layers)))
        if pruner.collapsed(outcomes[-1]):
            break
    return tuple(outcomes)


def minimal_model(pruner: Pruner, shortened: Sequence[PruneOutcome]) -> int:
    """How many layers the minimal model has."""
    standing = [outcome for outcome in shortened if not pruner.collapsed(outcome)]
    return len(pruner.subject.anatomy.blocks) - max((len(outcome.dropped) for outcome in standing), default=0)


def leave_one_out(pruner: Pruner, minimal: int) -> tuple[PruneOutcome, ...]:
    """The minimal model without each of its layers."""
    dropped = range(minimal, len(pruner.subject.anatomy.blocks))
    cuts = Track(range(minimal), "leaving layers out")
    return tuple(pruner.cut(f"minimal model without layer {layer}", dropped=[layer, *dropped]) for layer in cuts)


def keep_only(
    pruner: Pruner, gather: Collection[Site], aggregate: Collection[Site], minimal: int | None = None
) -> dict[str, PruneOutcome]:
    """In the layers of the given heads, silence all heads but the given ones, those of one role, or all. minimal: in the model
    of that many layers, which must hold them (default: in the whole)."""
    layers = len(pruner.subject.anatomy.blocks)
    minimal = layers if minimal is None else minimal
    pruner.subject.anatomy.check([*gather, *aggregate])
    roles = {"gather": heads_of(gather), "aggregate": heads_of(aggregate)}
    concerned = sorted({site.layer for heads in roles.values() for site in heads})
    minimal = max(minimal, *(layer + 1 for layer in concerned))
    all_heads = {head for layer in concerned for head in pruner.heads(layer)}
    outcomes = {}
    for what, kept in {"both": [*roles], "gather": ["gather"], "aggregate": ["aggregate"], "neither": []}.items():
        left = {head for role in kept for head in roles[role]}
        outcomes[what] = pruner.cut(f"{what} kept", dropped=range(minimal, layers), silent=all_heads - left)
    return outcomes


def last_rows(pruner: Pruner) -> dict[Kind, PruneOutcome]:
    """The whole hybrid without the mixing of each kind at the last position; nothing for a model of one kind."""
    mixers = pruner.subject.anatomy.mixers
    if len({mixer.kind for mixer in mixers}) < 2:
        return {}
    by_kind: dict[Kind, list[Site]] = {}
    for mixer in mixers:
        sites = (Site(mixer.layer, (mixer.first + head,)) for head in range(mixer.heads))
        by_kind.setdefault(mixer.kind, []).extend(sites)
    return {
        kind: pruner.cut(f"no {kind} at the last position", silent=sites, last_only=True) for kind, sites in by_kind.items()
    }


def heads_of(sites: Collection[Site]) -> set[Site]:
    """The single heads of sites. Raises UserError for a whole layer."""
    if layer := next((site for site in sites if not site.heads), None):
        raise UserError(f"{layer} is a layer; name its heads, e.g. {layer}.H0")
    return {head for site in sites for head in site.each()}
