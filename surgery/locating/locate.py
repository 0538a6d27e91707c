"""locate: which heads of a model retrieve, and at which of them attention would help.

All heads are ranked by splice attribution (attribution.py). The leading ones are ablated by position, which tells gather heads
from aggregate heads (roles.py); a share of them, if asked for, is spliced in turn (exact.py).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.statistics import LEVEL, estimate
from surgery.locating.ablation import Unit
from surgery.locating.attribution import STARTS, attribute
from surgery.locating.exact import measure_gains
from surgery.locating.roles import Found, find_roles
from surgery.modeling.graft import ChannelGraft, GraftMixer
from surgery.models.anatomy import Anatomy, anatomy
from surgery.probes.encoded import encode
from surgery.probes.question import Question
from surgery.records.plan import Start
from surgery.records.ranking import HeadScore, Ranking
from surgery.records.recipe import Locate
from surgery.records.site import Site
from surgery.splicing.splice import adopt, measuring

BLOCK = 16  # channels of a unit: those of a layer with neighbouring slopes
CHOSEN = 96  # questions on which heads are ablated by position, beside the query: with 24 a cost of half a nat is not shown


def locate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    options: Locate | None = None,
    *,
    nulls: Mapping[int, Tensor] | None = None,
) -> Ranking:
    """Rank all heads of a model by what attention there would save on some questions.

    options: which share of the heads, the leading ones, is measured exactly, and how many leading units are ablated by position
    (0: none); its probe names the questions in the ranking. nulls: of nulls.py, for heads that are to be grafted with
    null keys; without it, attention acts at every token. Attention heads have no slope, because there is nothing to
    splice there: theirs is 0, and what they do is told by ablation.

    Raises UserError for a model whose layout is not known, for fewer than two questions, and where logits are not finite.
    """
    asked = "the caller's questions" if options is None else options.probe
    options = options or Locate()
    if len(questions) < 2:
        raise UserError(f"locate needs at least 2 questions, not {len(questions)}")
    encoded, adopted = encode(tokenizer, questions), adopt(model)
    with measuring([model, adopted]):
        slopes = attribute(adopted, encoded, options.batch_size, nulls)
        units = rank_units(anatomy(adopted), slopes.slopes, nulls)
        found = Found({}, (), None)
        if options.roles and any(question.spans for question in questions):
            leading = [unit for unit, _, _ in units[: options.roles]]
            others = [unit for unit, _, _ in units[options.roles :]]
            chosen = np.linspace(0, len(questions) - 1, min(CHOSEN, len(questions))).astype(int).tolist()
            found = find_roles(adopted, encoded, leading, others, chosen, options.batch_size)
        spliced = [(unit, start) for unit, _, start in units if unit.layer in slopes.slopes and unit.place.kind == "ssm"]
        spliced = spliced[: math.ceil(options.exact * len(spliced) - 1e-9)]
        gains = measure_gains(adopted, encoded, spliced, options.batch_size)
    level = LEVEL / max(1, len(spliced))  # corrected for the number of heads that were measured
    measured = {name: estimate(gain.numpy(), decisions=False, level=level) for name, gain in gains.items()}
    heads = [
        HeadScore(
            site=Site(unit.layer, unit.heads),
            kind=unit.place.kind,
            slope=slope,
            start=start.model_copy(update={"null": None}),
            gain=measured.get(unit.name),
            roles=found.roles.get(unit.name),
        )
        for unit, slope, start in units
    ]
    heads.sort(key=lambda head: (-head.slope, -head.roles.everywhere.mean if head.roles else 0))
    return Ranking(
        heads=tuple(heads),
        groups=found.groups,
        circuit=found.circuit,
        probe=", ".join([asked, *(f"{value} {name}" for name, value in options.options.items())]),
        accuracy=estimate(slopes.correct),
        chance=float(np.mean([question.chance for question in questions])),
        loss=float(slopes.loss.mean()),
        questions=len(questions),
    )


def rank_units(
    places: Anatomy, slopes: Mapping[int, Tensor], nulls: Mapping[int, Tensor] | None
) -> list[tuple[Unit, float, Start]]:
    """(unit, slope, best start) of all units, those first that have most to gain. slopes: by layer, (starts, heads)."""
    units = []
    for place in places.mixers:
        if place.kind != "ssm" or place.layer not in slopes or not isinstance(place.module, GraftMixer):
            units += [(Unit(place, (place.first + head,)), 0.0, Start()) for head in range(place.heads)]
            continue
        table = slopes[place.layer]
        best = table.argmax(0)
        blocks = [[head] for head in range(place.heads)]
        if issubclass(place.module.graft_class, ChannelGraft):
            # Channels that start alike share queries and keys, so a layer has one start: that with most to gain in all.
            best = table.clamp_min(0).sum(1).argmax().expand(place.heads)
            order = table[best[0]].argsort(descending=True, stable=True).tolist()
            blocks = [order[i : i + BLOCK] for i in range(0, len(order), BLOCK)]
        for block in blocks:
            number = int(best[block[0]])
            start = STARTS[number]
            if nulls is not None:
                start = start.model_copy(update={"null": float(nulls[place.layer][number, block[0]])})
            heads = tuple(sorted(place.first + head for head in block))
            units.append((Unit(place, heads), float(table[number, block].sum()), start))
    return sorted(units, key=lambda unit: -unit[1])
