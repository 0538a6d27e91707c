"""locate(base): score every layer and head, exactly and by splice attribution."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.families import families
from surgery.loading.checkpoint import fingerprint
from surgery.loading.digests import conditions
from surgery.locating import roles
from surgery.locating.budget import affordable, look_at_base
from surgery.locating.exact import Exact
from surgery.locating.ledger import Ledger
from surgery.locating.prefilter import Prefilter, prefilter
from surgery.locating.questions import Asked, ask_all, questions_digest
from surgery.locating.ranking import Ranking, Score, gain
from surgery.locating.replay import How
from surgery.locating.stability import EXACT, ScoreName, Scores, stability
from surgery.models.anatomy import Anatomy, anatomy
from surgery.records.record import provenance, read_text, write_text
from surgery.records.site import Site
from surgery.splicing.splice import adopt
from surgery.statistics import LEVEL, intervals, mean, means

ROLE_EXAMPLES = 32  # mixing matrices vary little between dictionaries
ROLE_HEADS = 2048  # of more heads, matrices are written out for those alone that were measured exactly
LEADING = 10  # confirmed heads that are measured on all examples, and also ablated, for their roles
DECISIONS = ("ablation_drop", "splice_gain")  # scores that are differences of right and wrong answers
SHARES = ("answer_mass", "pair_mass")
DRAWN = 8  # heads that did not lead, measured as a control


def locate(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    probe: str = "kv",
    options: Mapping[str, Any] | None = None,
    examples: int = 256,
    exact: bool | None = None,
    confirm: float | None = None,
    layers: bool = True,
    ablation: How = "zero",
    batch_size: int = 32,
    seeds: int = 1,
    also: Sequence[Mapping[str, Any]] = (),
    budget: float = 600.0,
    seed: int = 0,
    name: str = "base",
    recipe: dict[str, Any] | None = None,
    kept: Path | None = None,
) -> Ranking:
    """Rank the heads of `base` on a choice probe, by default key-value retrieval with 32 pairs (options={"pairs": 32}).

    A base of a family with grafts is spliced and ablated; any other model whose layout is known (anatomy.py), hybrids among
    them, is ablated.

    exact: measure heads by ablating and splicing them (a head costs the layers above it); False: attribution alone (one
    forward and one backward); None: exactly, unless that would take longer than `budget` seconds (budget.py) or `confirm` is
    given. confirm: the share of heads, the leading ones by attribution, that are measured exactly; a few
    others, drawn at random, stand beside them. Those that cannot be among the LEADING ones are given up on the way, and only
    these are ablated as well as spliced. In a family without grafts there is no attribution: the heads of the layers whose
    ablation costs most lead. layers: measure whole layers too.
    ablation: "zero", or instead of nothing the "mean" over other questions, or the values on another one ("resample").
    seeds, also: repeat the ranking (its score alone, with the same grafts) with the questions of seed + 1, ..., and of other
    probes ({"probe": name, "options": {...}}), and compare; see stability.py.
    kept: a folder for what is measured, batch by batch; what is there already is not measured again.
    Choose the probe's options so that the base is neither perfect nor at chance: both a drop and a gain show. Where it shows no
    spans of evidence, no head has a role. Several processes (processes.py) share the batches.
    """
    check_locatable(base, exact)
    graftable = _graftable(base)
    base = adopt(base).eval()
    found = anatomy(base)
    asked, *others = rounds = ask_all(
        tokenizer, probe, options, seeds=seeds, also=also, seed=seed, examples=examples, batch_size=batch_size,
        ablation=ablation, device=base.device,
    )  # fmt: skip
    under = conditions(base, tokenizer)
    ledger = Ledger(kept, under.model_dump())
    first_look = Exact(base, None, found, asked.groups, how=ablation, reference=asked.reference, ledger=ledger)
    base_accuracy, chance_answer = look_at_base(first_look, asked)
    if exact is None:
        exact = confirm is not None or not graftable or affordable(
            first_look, found, rounds, kinds=2, layers=layers, budget=budget, keep=partial(_decided, kept)
        )  # fmt: skip
    filtered, values = prefilter(base, found, asked.groups, ledger) if graftable else (None, None)
    search = _Search(base, found, filtered, ledger, ablation, exact, confirm)
    measured, leading, drawn = search.first(asked, values, layers)
    sites = found.sites()

    looked_at = sites if len(sites) <= ROLE_HEADS else [*leading, *drawn]
    shown = asked.questions[:ROLE_EXAMPLES]
    answer_mass, pair_mass = roles.masses(base, tokenizer, shown, found=found, sites=looked_at)
    columns = measured.effects(sites) | {"answer_mass": answer_mass[_at(sites)], "pair_mass": pair_mass[_at(sites)]}
    if values is not None:
        columns["attribution"] = values[_at(sites)]
    estimates = _estimates(columns)
    # A role is a claim about one head among all, so it stands on intervals that are corrected for their number (Bonferroni).
    corrected = {
        field: intervals(columns[field], decisions=field in DECISIONS, level=LEVEL / len(sites)).low
        for field in ("ablation_loss", "splice_gain", *SHARES)
    }
    every = [
        Score(
            site=site,
            kind=found.mixer_of(site).kind,
            start=filtered.starts[str(site)] if filtered else None,
            **{field: estimates[field][i] for field in estimates},
        )
        for i, site in enumerate(sites)
    ]
    known = pair_mass.mean(0)
    typical = float(np.nanmedian(known)) if np.isfinite(known).any() else math.inf
    chance = float(np.mean([1 / max(1, len(question.spans)) for question in shown]))
    lows = [{field: float(low[i]) for field, low in corrected.items()} for i in range(len(sites))]
    every = [
        score.model_copy(update={"role": roles.role(score, low, chance, typical)})
        for score, low in zip(every, lows, strict=True)
    ]
    compared = None
    if others:
        first = search.scores(asked, measured, values)
        best = [sites[i] for i in first.leading(search.score, EXACT)]
        control = drawn or _drawn([sites[i] for i in first.leading(search.score, len(sites))[LEADING:]], seed)
        repeats = [search.again(other, [*best, *control]) for other in others]
        compared = stability(sites, [first, *repeats], search.score, control)
    return Ranking(
        provenance=provenance(name, fingerprint(base), seed, recipe),
        conditions=under,
        questions=questions_digest(rounds),
        probe={
            "name": asked.name, "options": asked.options, "examples": len(asked.questions), "seed": seed,
            "threads": torch.get_num_threads(), "ablation": ablation, "exact": exact, "confirm": confirm,
        },
        base_accuracy=base_accuracy,
        chance=chance_answer,
        base_loss=mean(measured.losses["base", None]),
        heads=tuple(sorted(every, key=gain, reverse=True)),
        layers=_layer_scores(found, measured, values),
        drawn=tuple(drawn),
        stability=compared,
    )  # fmt: skip


def _decided(kept: Path | None, exact: bool) -> bool:
    """The decision of an interrupted run in the folder `kept`; else this one, which is written there."""
    if kept is None:
        return exact
    decision = kept / "exact.json"
    if decision.exists():
        return json.loads(read_text(decision)) is True
    write_text(decision, json.dumps(exact))
    return exact


def check_locatable(base: PreTrainedModel, exact: bool | None = None) -> None:
    """Raise UserError if locate has nothing to measure in such a model."""
    if exact is False and not _graftable(base):
        raise UserError(
            f"a {base.config.model_type} model can only be ablated, so there is no attribution: locate needs exact=true"
        )
    anatomy(base)


def _graftable(base: PreTrainedModel) -> bool:
    """Whether grafts can be put into a model: its family has them, and it holds none yet."""
    return base.config.model_type in families() and not getattr(base.config, "grafts", None)


@dataclass(frozen=True)
class _Search:
    """How the heads of a base are measured, whatever the questions. filtered: None in a family without grafts."""

    base: PreTrainedModel
    found: Anatomy
    filtered: Prefilter | None
    ledger: Ledger
    ablation: How
    exact: bool
    confirm: float | None

    @property
    def score(self) -> ScoreName:
        """What heads are ranked by."""
        if not self.exact:
            return "attribution"
        return "splice_loss" if self.filtered else "ablation_loss"

    @property
    def kind(self) -> str:
        return "splice" if self.filtered else "ablate"

    def first(self, asked: Asked, values: np.ndarray | None, layers: bool) -> tuple[Exact, list[Site], list[Site]]:
        """Everything that a ranking says: (what was measured, leading heads, heads drawn among the others)."""
        measured, sites = self._exact(asked), self.found.sites()
        if not self.exact:
            measured.measure([], layers=False)
            return measured, [], []
        if self.confirm is None:
            measured.measure(None, layers=layers)
            return measured, sites, []
        leading, behind = self._split(measured, values)
        drawn = _drawn(behind, asked.seed)
        chosen = [*leading, *drawn]
        if self.filtered is None:
            measured.measure(chosen, layers=False, kinds=("ablate",), leading=LEADING)
        else:
            measured.measure(chosen, layers=layers, kinds=("splice",), leading=LEADING)
            gained = dict(zip(chosen, np.nanmean(measured.effects(chosen)["splice_loss"], axis=0), strict=True))
            best = sorted(chosen, key=lambda site: -gained[site])[:LEADING]
            measured.measure(best, layers=layers, kinds=("ablate",))
        return measured, leading, drawn

    def again(self, asked: Asked, always: Sequence[Site]) -> Scores:
        """What ranks heads, and nothing else, on other questions; `always`: heads that are not given up."""
        values = None if self.filtered is None else self.filtered.attributions(asked.groups)
        measured = self._exact(asked)
        if not self.exact:
            measured.measure([], layers=False)
        elif self.confirm is None:
            measured.measure(None, layers=False, kinds=(self.kind,))
        else:
            leading, _ = self._split(measured, values)
            measured.measure(leading, layers=False, kinds=(self.kind,), leading=LEADING)
            measured.measure(always, layers=False, kinds=(self.kind,))
        return self.scores(asked, measured, values)

    def scores(self, asked: Asked, measured: Exact, values: np.ndarray | None) -> Scores:
        sites = self.found.sites()
        columns: dict[ScoreName, np.ndarray] = {}
        if self.exact:
            columns[self.score] = measured.effects(sites)[self.score]
        if values is not None:
            columns["attribution"] = values[_at(sites)]
        probe = {"name": asked.name, "options": asked.options}
        return Scores(probe, asked.seed, measured.correct["base", None], columns)

    def _exact(self, asked: Asked) -> Exact:
        gated, ledger = (self.filtered.gated, self.filtered.ledger) if self.filtered else (None, self.ledger)
        return Exact(
            self.base, gated, self.found, asked.groups, how=self.ablation, reference=asked.reference, ledger=ledger
        )  # fmt: skip

    def _split(self, measured: Exact, values: np.ndarray | None) -> tuple[list[Site], list[Site]]:
        """The share of the heads that is to be confirmed, the most promising first (by attribution, or by what ablating their
        layer costs, which this measures), and the others."""
        assert self.confirm is not None
        sites = self.found.sites()
        if values is not None:
            promise = dict(zip(sites, values.mean(0)[_at(sites)[1:]], strict=True))
        else:
            measured.measure([], layers=True)
            layers = self.found.layers()
            cost = measured.effects([Site(layer) for layer in layers])["ablation_loss"].mean(0)
            of = dict(zip(layers, cost, strict=True))
            promise = {site: of[site.layer] for site in sites}
        order = sorted(sites, key=lambda site: -promise[site])
        count = math.ceil(self.confirm * len(sites))
        return order[:count], order[count:]


def _drawn(behind: list[Site], seed: int) -> list[Site]:
    """A control: a few of the heads that do not lead."""
    return sorted(random.Random(f"control {seed}").sample(behind, min(DRAWN, len(behind))))


def _at(sites: Sequence[Site]) -> tuple[slice, list[int], list[int]]:
    """Where heads stand in an array (examples, layers, heads)."""
    return slice(None), [site.layer for site in sites], [site.heads[0] for site in sites]


def _estimates(columns: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    """Score's fields, site by site, from the values of every example (examples, sites)."""
    return {
        field: means(column, decisions=field in DECISIONS, **({"within": (0, 1)} if field in SHARES else {}))
        for field, column in columns.items()
    }


def _layer_scores(found: Anatomy, measured: Exact, values: np.ndarray | None) -> tuple[Score, ...]:
    sites = [Site(layer) for layer in found.layers()]
    columns = measured.effects(sites)
    if values is not None:
        columns["attribution"] = values[:, found.layers()].sum(-1)
    estimates = _estimates(columns)
    scores = []
    for i, site in enumerate(sites):
        kinds = {mixer.kind for mixer in found.at(site.layer)}
        kind = kinds.pop() if len(kinds) == 1 else None
        scores.append(Score(site=site, kind=kind, **{field: estimates[field][i] for field in estimates}))
    return tuple(scores)
