"""locate(base): score every layer and head, exactly and by splice attribution."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.loading.opened import Checkpoint
from surgery.locating import roles
from surgery.locating.budget import look_at_base, with_exactness
from surgery.locating.exact import Exact
from surgery.locating.ledger import Ledger
from surgery.locating.prefilter import prefilter
from surgery.locating.questions import QuestionSet, question_sets, questions_digest
from surgery.locating.ranking import Ranking, Score, gain
from surgery.locating.replay import How
from surgery.locating.search import LEADING, Search, drawn, index_of
from surgery.locating.stability import EXACT, Stability, stability
from surgery.locating.subject import Subject, is_graftable
from surgery.models.anatomy import anatomy
from surgery.records.recipe import Locate
from surgery.records.record import first_line, provenance
from surgery.records.site import Site
from surgery.statistics import LEVEL, intervals, mean, means

ROLE_EXAMPLES = 32  # mixing matrices vary little between dictionaries
ROLE_HEADS = 2048  # of more heads, matrices are written out for those alone that were measured exactly
DECISIONS = ("ablation_drop", "splice_gain")  # scores that are differences of right and wrong answers
SHARES = ("answer_mass", "pair_mass")
TESTED = ("ablation_loss", "splice_gain", *SHARES)  # scores on which roles stand


def locate(
    base: PreTrainedModel | Checkpoint,
    tokenizer: PreTrainedTokenizerBase | None = None,
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
    name: str | None = None,
    recipe: dict[str, Any] | None = None,
    kept: Path | None = None,
) -> Ranking:
    """Rank the heads of `base` on a choice probe, by default key-value retrieval with 32 pairs (options={"pairs": 32}).

    base: a Checkpoint as surgery.load returns it, or a model with its tokenizer. One of a family with grafts is spliced and
    ablated; any other model whose layout is known (models/anatomy.py), hybrids among them, is ablated.

    exact: measure heads by ablating and splicing them (a head costs the layers above it); False: attribution alone (one
    forward and one backward); None: exactly if that takes at most `budget` seconds (budget.py). confirm: the share of heads,
    the leading ones by attribution, that are measured exactly; a few others, drawn at random, stand beside them. Those that
    cannot be among the LEADING ones are given up on the way, and only these are ablated as well as spliced. In a family without
    grafts there is no attribution: the heads of the layers whose ablation costs most lead. layers: measure whole layers too.
    ablation: what comes instead of an ablated head: "zero", its "mean" over other questions, or its values on another one
    ("resample").
    seeds, also: repeat the ranking (its score alone, with the same grafts) with the questions of seed + 1, ..., and of other
    probes ({"probe": name, "options": {...}}), and compare; see stability.py.
    name: what the ranking calls the base; a Checkpoint has one. kept: a folder for what is measured, batch by batch; what is
    there already is not measured again.

    Choose the probe's options so that the base is neither perfect nor at chance: both a drop and a gain show. Where it shows no
    spans of evidence, no head has a role. Several processes (processes.py) share the batches.

    Raises UserError for arguments that do not fit, and for a model whose layout is not known.
    """
    given: dict[str, Any] = {"also": also} if options is None else {"also": also, "options": options}
    try:
        chosen = Locate(
            probe=probe, examples=examples, exact=exact, confirm=confirm, layers=layers, ablation=ablation,
            batch_size=batch_size, seeds=seeds, budget=budget, **given,
        )  # fmt: skip
    except ValidationError as error:
        raise UserError(f"locate: {first_line(error)}") from error
    return rank(Subject.of(base, tokenizer, name), chosen, seed=seed, recipe=recipe, kept=kept)


def check_locatable(base: PreTrainedModel, exact: bool | None = None) -> None:
    """Raise UserError if locate has nothing to measure in such a model."""
    if exact is False and not is_graftable(base):
        raise UserError(
            f"a {base.config.model_type} model can only be ablated, so there is no attribution: locate needs exact=true"
        )
    anatomy(base)


def rank(
    subject: Subject, options: Locate, *, seed: int = 0, recipe: dict[str, Any] | None = None, kept: Path | None = None
) -> Ranking:
    """What locate does, with its options in one record."""
    check_locatable(subject.model, options.exact)
    first, *others = sets = question_sets(subject.tokenizer, options, seed=seed, device=subject.model.device)
    ledger = Ledger(kept, subject.conditions.model_dump())
    base_accuracy, chance = look_at_base(subject, first, options, ledger)
    options = with_exactness(options, subject, sets, kept)
    filtered, attributions = prefilter(subject, first.groups, ledger) if subject.graftable else (None, None)
    search = Search(subject, filtered, ledger, options)
    measured, leading, control = search.first(first, attributions)
    sites = subject.anatomy.sites()
    shown = first.questions[:ROLE_EXAMPLES]
    answer_mass, pair_mass = roles.masses(subject, shown, sites if len(sites) <= ROLE_HEADS else [*leading, *control])
    columns = measured.effects(sites)
    columns |= {"answer_mass": answer_mass[index_of(sites)], "pair_mass": pair_mass[index_of(sites)]}
    if attributions is not None:
        columns["attribution"] = attributions[index_of(sites)]
    starts = filtered.starts if filtered else {}
    estimates = _estimates(columns)
    scores = [
        Score(
            site=site,
            kind=subject.anatomy.mixer_of(site).kind,
            start=starts.get(str(site)),
            **{field: estimates[field][i] for field in estimates},
        )
        for i, site in enumerate(sites)
    ]
    even = float(np.mean([1 / max(1, len(question.spans)) for question in shown]))
    scores = _with_roles(scores, columns, even, pair_mass)
    compared = _compare(search, first, others, measured, attributions, control) if others else None
    return Ranking(
        provenance=provenance(subject.name, subject.fingerprint, seed, recipe),
        conditions=subject.conditions,
        questions=questions_digest(sets),
        probe={
            "name": first.name, "options": first.options, "examples": len(first.questions), "seed": seed,
            "threads": torch.get_num_threads(), "ablation": options.ablation, "exact": options.exact,
            "confirm": options.confirm,
        },
        base_accuracy=base_accuracy,
        chance=chance,
        base_loss=mean(measured.losses["base", None]),
        heads=tuple(sorted(scores, key=gain, reverse=True)),
        layers=_layer_scores(subject, measured, attributions),
        drawn=tuple(control),
        stability=compared,
    )  # fmt: skip


def _estimates(columns: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    """Score's fields, site by site, from the values of all examples (examples, sites)."""
    return {
        field: means(column, decisions=field in DECISIONS, **({"within": (0, 1)} if field in SHARES else {}))
        for field, column in columns.items()
    }


def _with_roles(
    scores: Sequence[Score], columns: Mapping[str, np.ndarray], chance: float, pair_mass: np.ndarray
) -> list[Score]:
    """The scores with the heads' roles. chance: of picking the answer's span. pair_mass (questions, layers, heads)."""
    # A role is a claim about one head among all, so it stands on intervals that are corrected for their number (Bonferroni).
    level = LEVEL / len(scores)
    low = {field: intervals(columns[field], decisions=field in DECISIONS, level=level).low for field in TESTED}
    known = pair_mass.mean(0)
    typical = float(np.nanmedian(known)) if np.isfinite(known).any() else math.inf
    lows = [{field: float(values[i]) for field, values in low.items()} for i in range(len(scores))]
    return [
        score.model_copy(update={"role": roles.role(score, low, chance, typical)})
        for score, low in zip(scores, lows, strict=True)
    ]


def _compare(
    search: Search,
    first: QuestionSet,
    others: Sequence[QuestionSet],
    measured: Exact,
    attributions: np.ndarray | None,
    control: list[Site],
) -> Stability:
    """The ranking repeated with other questions."""
    sites = search.subject.anatomy.sites()
    scores = search.scores(first, measured, attributions)
    best = [sites[i] for i in scores.leading(search.score, EXACT)]
    control = control or drawn([sites[i] for i in scores.leading(search.score, len(sites))[LEADING:]], first.seed)
    repeats = [search.again(questions, [*best, *control]) for questions in others]
    return stability(sites, [scores, *repeats], search.score, control)


def _layer_scores(subject: Subject, measured: Exact, attributions: np.ndarray | None) -> tuple[Score, ...]:
    layers = subject.anatomy.layers()
    sites = [Site(layer) for layer in layers]
    columns = measured.effects(sites)
    if attributions is not None:
        columns["attribution"] = attributions[:, layers].sum(-1)
    estimates = _estimates(columns)
    scores = []
    for i, site in enumerate(sites):
        kinds = {mixer.kind for mixer in subject.anatomy.at(site.layer)}
        kind = kinds.pop() if len(kinds) == 1 else None
        scores.append(Score(site=site, kind=kind, **{field: estimates[field][i] for field in estimates}))
    return tuple(scores)
