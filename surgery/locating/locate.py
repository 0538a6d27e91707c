"""locate(base): score every layer and head, exactly and by splice attribution."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.families import family_of
from surgery.loading.opened import Checkpoint
from surgery.locating import roles
from surgery.locating.budget import look_at_base, with_exactness
from surgery.locating.estimates import SHARES, are_decisions, estimated, everywhere
from surgery.locating.exact import Exact
from surgery.locating.heads import KINDS, ROLES, SCORES, Heads, Score
from surgery.locating.ledger import Ledger
from surgery.locating.prefilter import prefilter
from surgery.locating.questions import QuestionSet, question_sets, questions_digest
from surgery.locating.ranking import Ranking
from surgery.locating.search import LEADING, Search, drawn, of_heads
from surgery.locating.skill_scores import skill_scores, skill_sets, slopes
from surgery.locating.stability import EXACT, ScoreColumn, Stability, stability
from surgery.locating.subject import Subject, is_graftable
from surgery.models.anatomy import anatomy
from surgery.records.plan import Plan, Start
from surgery.records.recipe import Data, Locate
from surgery.records.record import provenance
from surgery.records.site import Site
from surgery.runtime.ownership.files import writing
from surgery.splicing.splice import check_start
from surgery.statistics import LEVEL, mean, means

ROLE_HEADS = 2048  # of more heads, matrices are written out for those alone that were measured exactly
TESTED = ("ablation_loss", "splice_gain", *SHARES)  # scores on which roles stand


def locate(
    base: PreTrainedModel | Checkpoint,
    tokenizer: PreTrainedTokenizerBase | None = None,
    settings: Locate | None = None,
    *,
    data: Data | None = None,
    seed: int = 0,
    name: str | None = None,
    recipe: dict[str, Any] | None = None,
    kept: Path | None = None,
    **fields: Any,
) -> Ranking:
    """Rank the heads of `base` on a choice probe, by default key-value retrieval with 32 pairs (options={"pairs": 32}).

    base: a Checkpoint as surgery.load returns it, or a model with its tokenizer. One of a family with grafts is spliced and
    ablated; any other model whose layout is known (models/anatomy.py), hybrids among them, is ablated.

    settings: surgery.Locate(examples=64, ...), or its fields by name: locate(base, examples=64). With exact=False, and where a
    look at the model says that more takes longer than BUDGET, attribution ranks alone: one forward and one backward. With a
    share, the leading heads are measured exactly, and a few others, drawn at random, beside them; those that cannot be among
    the LEADING ones are given up on the way, and only these are ablated as well as spliced. In a family without grafts there is
    no attribution: the heads of the layers whose ablation costs most lead.
    data: its skills (Data.skills) are what the heads are also measured on, on fewer questions; see skill_scores.py.
    name: what the ranking calls the base; a Checkpoint has one. kept: a folder for what is measured, batch by batch; what is
    there already is not measured again.

    Choose the probe's options so that the base is neither perfect nor at chance: both a drop and a gain show. Where it shows no
    spans of evidence, no head has a role. Several processes (processes.py) share the batches.

    Raises UserError for arguments that do not fit, and for a model whose layout is not known.
    """
    chosen = Locate.of(settings, fields, "locate")
    with writing(kept):
        return rank(Subject.of(base, tokenizer, name), chosen, data=data, seed=seed, recipe=recipe, kept=kept)


def check_locatable(base: PreTrainedModel, exact: float | None = None, init: str = "dual") -> None:
    """Raise UserError if locate has nothing to measure in such a model, or its grafts cannot start so."""
    _check_measurable(base, exact, init)
    anatomy(base)


def _check_measurable(base: PreTrainedModel, exact: float | None, init: str) -> None:
    """The same of a model whose layout is known."""
    if init == "induction" and not is_graftable(base):
        raise UserError(f"locate.init: says how grafts start, and a {base.config.model_type} model takes none; leave it out")
    if init == "induction":
        check_start(base, Plan(sites=(Site(family_of(base.config).graftable(base)[0], (0,)),), init="induction"))
    if exact == 0 and not is_graftable(base):
        raise UserError(
            f"a {base.config.model_type} model can only be ablated, so there is no attribution: locate needs exact=true"
        )
    if any(graft.get("own_values") for graft in getattr(base.config, "grafts", None) or ()):
        raise UserError(
            "heads cannot be located in a hybrid with heads that copy (plan.init), as they add to all; locate in its base"
        )


def rank(
    subject: Subject, options: Locate, *, data: Data | None = None, seed: int = 0, recipe: dict[str, Any] | None = None,
    kept: Path | None = None,
) -> Ranking:  # fmt: skip
    """What locate does, with its options in one record."""
    _check_measurable(subject.model, options.exact, options.init)
    first, *others = sets = question_sets(subject.tokenizer, options, seed=seed, device=subject.model.device)
    ledger = Ledger(kept, subject.conditions.model_dump())
    if options.init != "dual":
        subject, ledger = replace(subject, init=options.init), ledger.extended("init", options.init)
    base_accuracy, chance = look_at_base(subject, first, options, ledger)
    options = with_exactness(options, subject, sets, kept)
    filtered, attributions = None, None
    if subject.graftable:
        filtered, attributions = prefilter(subject, first.groups, ledger, whole="batch_size" in options.model_fields_set)
    of_skills = skill_sets(subject, data or Data(), options, first, seed=seed)
    attributed = [slopes(filtered, questions, subject.anatomy) if filtered else None for questions in of_skills]
    search = Search(subject, filtered, ledger, options)
    measured, leading, control = search.first(first, attributions)
    anatomy = subject.anatomy
    shown = first.questions[: roles.EXAMPLES]
    measurable = anatomy.sites() if len(anatomy.coordinates[0]) <= ROLE_HEADS else sorted({*leading, *control})
    answer_mass, pair_mass = roles.masses(subject, shown, measurable)
    heads = measured.heads()
    columns = {name: ScoreColumn(values, anatomy.numbers(heads)) for name, values in measured.effects(heads).items()}
    at = anatomy.numbers(measurable)
    columns |= {name: ScoreColumn(of_heads(values, anatomy)[:, at], at)
                for name, values in zip(SHARES, (answer_mass, pair_mass), strict=True)}  # fmt: skip
    if attributions is not None:
        columns["attribution"] = ScoreColumn(of_heads(attributions, anatomy))
    scores = _scores(subject, columns, filtered.starts if filtered else {})
    even = float(np.mean([1 / max(1, len(question.spans)) for question in shown]))
    scores = _with_roles(scores, columns, even, pair_mass)
    compared = _compare(search, first, others, measured, attributions, control) if others else None
    skills = [
        skill_scores(search, questions, heads, scores, slope) for questions, slope in zip(of_skills, attributed, strict=True)
    ]
    return Ranking(
        provenance=provenance(subject.name, subject.fingerprint, seed, recipe),
        conditions=subject.conditions,
        questions=questions_digest(sets),
        probe={
            "name": first.name, "options": first.options, "examples": len(first.questions), "seed": seed,
            "threads": torch.get_num_threads(), "ablation": options.ablation, "exact": options.exact,
        },
        base_accuracy=base_accuracy,
        chance=chance,
        base_loss=mean(measured.losses["base", None]),
        heads=scores.sorted(),
        layers=_layer_scores(subject, measured, attributions),
        init=options.init,
        drawn=tuple(control),
        stability=compared,
        skills=tuple(skills),
    )  # fmt: skip


def _scores(subject: Subject, columns: Mapping[str, ScoreColumn], starts: Mapping[str, Start]) -> Heads:
    """The heads in the model's order, without roles."""
    layers, heads = subject.anatomy.coordinates
    sign, tau = np.zeros(len(layers), dtype=np.int8), np.full(len(layers), np.nan)
    for i in np.flatnonzero(subject.anatomy.of_ssms).tolist() if starts else ():
        start = starts[f"L{layers[i]}.H{heads[i]}"]
        sign[i], tau[i] = start.sign, start.tau
    kinds = np.zeros(len(layers), dtype=np.uint8)
    for mixer in subject.anatomy.mixers:
        kinds[(layers == mixer.layer) & (heads >= mixer.first) & (heads < mixer.first + mixer.heads)] = KINDS.index(mixer.kind)
    estimates = {}
    for name in (name for name in SCORES if name in columns):
        whole = everywhere(estimated(name, columns[name]), columns[name].at, len(layers))
        if whole.n.any():
            estimates[name] = whole
    return Heads(layers, heads, kinds, np.zeros(len(layers), dtype=np.uint8), sign, tau, estimates)


def _with_roles(scores: Heads, columns: Mapping[str, ScoreColumn], chance: float, pair_mass: np.ndarray) -> Heads:
    """The scores with the heads' roles. chance: of picking the answer's span. pair_mass (questions, layers, heads)."""
    # A role is a claim about one head among all, so it rests on intervals that are corrected for their number (Bonferroni).
    level = LEVEL / len(scores)
    low = {}
    for name in TESTED:
        low[name] = np.full(len(scores), np.nan)
        at = columns[name].at
        low[name][slice(None) if at is None else at] = estimated(name, columns[name], level).low
    known = pair_mass.mean(0)
    typical = float(np.nanmedian(known)) if np.isfinite(known).any() else math.inf
    numbers = scores.role.copy()
    for i in np.flatnonzero(scores.measured("ablation_loss")).tolist():  # no other head has one
        lows = {name: float(values[i]) for name, values in low.items()}
        numbers[i] = ROLES.index(roles.role(scores[i], lows, chance, typical))
    return replace(scores, role=numbers)


def _compare(
    search: Search,
    first: QuestionSet,
    others: Sequence[QuestionSet],
    measured: Exact,
    attributions: np.ndarray | None,
    control: list[Site],
) -> Stability:
    """The ranking repeated with other questions."""
    anatomy = search.subject.anatomy
    scores = search.scores(first, measured, attributions)
    best = [anatomy.site(number) for number in scores.leading(search.score, EXACT)]
    control = control or drawn(anatomy, scores.leading(search.score, scores.sites)[LEADING:], first.seed)
    repeats = [search.again(questions, [*best, *control]) for questions in others]
    return stability(anatomy.site, [scores, *repeats], search.score, anatomy.numbers(control).tolist())


def _layer_scores(subject: Subject, measured: Exact, attributions: np.ndarray | None) -> tuple[Score, ...]:
    layers = subject.anatomy.layers()
    sites = [Site(layer) for layer in layers]
    columns = measured.effects(sites)
    if attributions is not None:
        of_layers = attributions[:, layers].astype(float)
        columns["attribution"] = np.where(np.isnan(of_layers).all(-1), np.nan, np.nansum(of_layers, -1))
    estimates: dict[str, list[Any]] = {
        name: means(column, decisions=are_decisions(name, column)) for name, column in columns.items()
    }  # fmt: skip
    scores = []
    for i, site in enumerate(sites):
        kinds = {mixer.kind for mixer in subject.anatomy.mixers_of(site.layer)}
        kind = kinds.pop() if len(kinds) == 1 else None
        scores.append(Score(site=site, kind=kind, **{field: estimates[field][i] for field in estimates}))
    return tuple(scores)
