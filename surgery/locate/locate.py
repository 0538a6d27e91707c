"""locate(base): score every layer and head, exactly and by splice attribution."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.anatomy import Anatomy, anatomy
from surgery.checkpoint import fingerprint
from surgery.errors import UserError
from surgery.families import families
from surgery.locate import roles
from surgery.locate.attribution import STARTS, attribute_starts, best_starts
from surgery.locate.exact import Exact, reference_batch
from surgery.locate.ranking import Ranking, Score, gain
from surgery.locate.replay import How
from surgery.locate.walk import fully_gated
from surgery.plan import Start
from surgery.probes.kv import KVRetrieval
from surgery.probes.scoring import Encoded, batches
from surgery.records import provenance
from surgery.site import Site
from surgery.splice import adopt
from surgery.statistics import mean, means

ROLE_EXAMPLES = 32  # mixing matrices vary little between dictionaries
ROLE_HEADS = 2048  # of more heads, matrices are written out for those alone that were measured exactly
START_EXAMPLES = 64  # a sign is plain from few
REFERENCE_EXAMPLES = 32  # for mean and resample ablation
LEADING = 10  # confirmed heads that are measured on all examples, and also ablated, for their roles
DRAWN = 8  # heads that did not lead, measured as a control

Groups = list[tuple[list[int], Encoded]]


def locate(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    pairs: int = 32,
    examples: int = 256,
    exact: bool = True,
    confirm: float | None = None,
    layers: bool = True,
    ablation: How = "zero",
    batch_size: int = 32,
    seed: int = 0,
    name: str = "base",
    recipe: dict[str, Any] | None = None,
) -> Ranking:
    """Rank the heads of `base` on key-value retrieval with `pairs` pairs.

    A base of a family with grafts is spliced and ablated; any other model whose layout is known (anatomy.py), ablated.

    exact: measure heads by ablating and splicing them (a head costs the layers above it); without, attribution alone (one
    forward and one backward). confirm: the share of heads, the leading ones by attribution, that are measured exactly; a few
    others, drawn at random, stand beside them. Those that cannot be among the LEADING ones are given up on the way, and only
    these are ablated as well as spliced. In a family without grafts there is no attribution: the heads of the layers whose
    ablation costs most lead. layers: measure whole layers too.
    ablation: "zero", or instead of nothing the "mean" over other dictionaries, or the values on another one ("resample").
    Choose `pairs` so that the base is neither perfect nor at chance: both a drop and a gain show.
    """
    if examples < 2:
        raise UserError("locating needs at least 2 examples")
    check_locatable(base, exact)
    graftable = base.config.model_type in families()
    base = (adopt(base) if graftable else base).eval()
    found = anatomy(base)
    questions = KVRetrieval(pairs).questions(examples, seed)
    groups = list(batches(tokenizer, questions, batch_size))
    sites = found.sites()
    prefilter = _attributions(base, found, groups, examples) if graftable else None

    reference = None
    if ablation != "zero":
        others = KVRetrieval(pairs).questions(REFERENCE_EXAMPLES, -1 - seed)
        reference = reference_batch(tokenizer, others, base.device)
    measured = Exact(base, prefilter.gated if prefilter else None, found, groups, how=ablation, reference=reference)
    leading: list[Site] = sites
    drawn: list[Site] = []
    if not exact:
        leading = []
        measured.measure([], layers=False)
    elif confirm is None:
        measured.measure(None, layers=layers)
    else:
        if prefilter is None:
            measured.measure([], layers=True)
        order = _order(sites, measured, prefilter)
        count = math.ceil(confirm * len(sites))
        leading, behind = order[:count], order[count:]
        drawn = sorted(random.Random(f"control {seed}").sample(behind, min(DRAWN, len(behind))))
        chosen = [*leading, *drawn]
        if prefilter is None:
            measured.measure(chosen, layers=False, kinds=("ablate",), leading=LEADING)
        else:
            measured.measure(chosen, layers=layers, kinds=("splice",), leading=LEADING)
            gained = dict(zip(chosen, np.nanmean(measured.effects(chosen)["splice_loss"], axis=0), strict=True))
            best = sorted(chosen, key=lambda site: -gained[site])[:LEADING]
            measured.measure(best, layers=layers, kinds=("ablate",))

    looked_at = sites if len(sites) <= ROLE_HEADS else [*leading, *drawn]
    answer_mass, pair_mass = roles.masses(base, tokenizer, questions[:ROLE_EXAMPLES], found=found, sites=looked_at)
    at = (slice(None), [site.layer for site in sites], [site.heads[0] for site in sites])
    columns = measured.effects(sites) | {"answer_mass": answer_mass[at], "pair_mass": pair_mass[at]}
    if prefilter:
        columns["attribution"] = prefilter.values[at]
    estimates: dict[str, list[Any]] = {field: means(values) for field, values in columns.items()}
    every = [
        Score(
            site=site,
            kind=found.mixer_of(site).kind,
            start=prefilter.starts[str(site)] if prefilter else None,
            **{field: values[i] for field, values in estimates.items()},
        )
        for i, site in enumerate(sites)
    ]
    known = pair_mass.mean(0)
    typical = float(np.nanmedian(known)) if np.isfinite(known).any() else math.inf
    every = [score.model_copy(update={"role": roles.role(score, pairs, typical)}) for score in every]
    return Ranking(
        provenance=provenance(name, fingerprint(base), seed, recipe),
        probe={
            "name": "kv", "pairs": pairs, "examples": examples, "seed": seed, "threads": torch.get_num_threads(),
            "ablation": ablation, "confirm": confirm,
        },
        base_accuracy=mean(measured.correct["base", None]),
        base_loss=mean(measured.losses["base", None]),
        heads=tuple(sorted(every, key=gain, reverse=True)),
        layers=_layer_scores(found, measured, prefilter),
        drawn=tuple(drawn),
    )  # fmt: skip


def check_locatable(base: PreTrainedModel, exact: bool = True) -> None:
    """Raise UserError if locate has nothing to measure in such a model."""
    if getattr(base.config, "grafts", None):
        raise UserError("locate works on a base; unsplice the hybrid first")
    if not exact and base.config.model_type not in families():
        raise UserError(f"a {base.config.model_type} model has no grafts, so no attribution: locate needs exact=true")
    anatomy(base)


@dataclass(frozen=True)
class _Prefilter:
    """The fully gated base, the starts of its grafts, and every head's attribution (examples, layers, heads)."""

    gated: PreTrainedModel
    starts: dict[str, Start]
    values: np.ndarray


def _attributions(base: PreTrainedModel, found: Anatomy, groups: Groups, examples: int) -> _Prefilter:
    layers, heads = len(found.blocks), found.heads(0)
    ungated = fully_gated(base, layers, heads)
    values, first, starts = np.zeros((examples, layers, heads)), [], None
    for number, (chosen, encoded) in enumerate(groups):
        first.append((chosen, attribute_starts(ungated, encoded)))
        if starts is None and sum(len(some) for some, _ in first) < START_EXAMPLES and number + 1 < len(groups):
            continue
        if starts is None:
            channels = found.mixers[0].width == 1
            starts = best_starts(torch.stack([some.sum(1) for _, some in first]).sum(0), channels)
            number_of = {start: i for i, start in enumerate(STARTS)}
            index = torch.tensor([number_of[start] for start in starts.values()]).view(1, 1, layers, heads)
        for some, every in first:
            values[some] = every.take_along_dim(index, 0)[0].numpy()
        first = []
    assert starts is not None
    return _Prefilter(fully_gated(base, layers, heads, starts), starts, values)


def _order(sites: Sequence[Site], measured: Exact, prefilter: _Prefilter | None) -> list[Site]:
    """Heads, the most promising first: by attribution, or by what ablating their layer costs."""
    if prefilter is not None:
        attribution = prefilter.values.mean(0)
        return sorted(sites, key=lambda site: -attribution[site.layer, site.heads[0]])
    cost = measured.effects([Site(layer) for layer in measured.found.layers()])["ablation_loss"].mean(0)
    of = dict(zip(measured.found.layers(), cost, strict=True))
    return sorted(sites, key=lambda site: -of[site.layer])


def _layer_scores(found: Anatomy, measured: Exact, prefilter: _Prefilter | None) -> tuple[Score, ...]:
    sites = [Site(layer) for layer in found.layers()]
    columns = measured.effects(sites)
    if prefilter:
        columns["attribution"] = prefilter.values[:, found.layers()].sum(-1)
    estimates: dict[str, list[Any]] = {field: means(values) for field, values in columns.items()}
    scores = []
    for i, site in enumerate(sites):
        kinds = {mixer.kind for mixer in found.at(site.layer)}
        kind = kinds.pop() if len(kinds) == 1 else None
        scores.append(Score(site=site, kind=kind, **{field: values[i] for field, values in estimates.items()}))
    return tuple(scores)
