"""locate(base): score every layer and head, exactly and by splice attribution."""

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.checkpoint import fingerprint
from surgery.errors import UserError
from surgery.families import family_of
from surgery.locate import roles, walk
from surgery.locate.attribution import attribute, choose_starts
from surgery.locate.ranking import Ranking, Score, gain
from surgery.probes.kv import KVRetrieval
from surgery.probes.scoring import batches, padded
from surgery.progress import Track
from surgery.records import provenance
from surgery.site import Site
from surgery.splice import adopt
from surgery.statistics import mean

ROLE_EXAMPLES = 32  # mixing matrices vary little between dictionaries
START_EXAMPLES = 64  # a sign is plain from few


def locate(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    pairs: int = 32,
    examples: int = 256,
    exact: bool = True,
    batch_size: int = 32,
    seed: int = 0,
    name: str = "base",
    recipe: dict[str, Any] | None = None,
) -> Ranking:
    """Rank the heads of `base` on key-value retrieval with `pairs` pairs.

    exact: measure ablation and splice of every site (every head costs the layers above it); without, attribution alone (one
    forward and one backward). Choose `pairs` so that the base is neither perfect nor at chance: both a drop and a gain show.
    """
    if examples < 2:
        raise UserError("locating needs at least 2 examples")
    family = family_of(base.config)
    family.check_graftable()
    layers, heads = family.shape(base.config)
    base = adopt(base).eval()
    if getattr(base.config, "grafts", None):
        raise UserError("locate works on a base; unsplice the hybrid first")
    questions = KVRetrieval(pairs).questions(examples, seed)
    groups = list(batches(tokenizer, questions, batch_size))
    starts = choose_starts(base, layers, heads, [encoded for _, encoded in groups[: -(-START_EXAMPLES // batch_size)]])
    gated = walk.fully_gated(base, layers, heads, starts)

    correct: dict[tuple[str, Site | None], np.ndarray] = defaultdict(lambda: np.zeros(examples))
    losses: dict[tuple[str, Site | None], np.ndarray] = defaultdict(lambda: np.zeros(examples))
    attributions = np.zeros((examples, layers, heads))
    per_batch = 1 + 2 * layers * (heads + 1) if exact else 1
    progress = iter(Track(range(len(groups) * per_batch), "locate"))
    for chosen, encoded in groups:
        ids, last = padded(encoded.rows, base.device)
        for variant in walk.variants(base, gated, ids, last):
            key = (variant.kind, variant.site)
            correct[key][chosen] = encoded.correct(variant.logits).cpu().numpy()
            losses[key][chosen] = encoded.losses(variant.logits).cpu().numpy()
            next(progress, None)
            if not exact:
                break  # the base alone
        attributions[chosen] = attribute(gated, encoded).numpy()
    next(progress, None)

    answer_mass, pair_mass = roles.masses(base, tokenizer, questions[:ROLE_EXAMPLES])

    def score(site: Site) -> Score:
        measured: dict[str, Any] = {"site": site}
        if exact:
            measured |= {
                "ablation_drop": mean(correct["base", None] - correct["ablate", site]),
                "ablation_loss": mean(losses["ablate", site] - losses["base", None]),
                "splice_gain": mean(correct["splice", site] - correct["base", None]),
                "splice_loss": mean(losses["base", None] - losses["splice", site]),
            }
        if site.heads:
            at = (slice(None), site.layer, site.heads[0])
            measured |= {
                "start": starts[str(site)],
                "attribution": mean(attributions[at]),
                "answer_mass": mean(answer_mass[at]),
                "pair_mass": mean(pair_mass[at]),
            }
        else:
            measured["attribution"] = mean(attributions[:, site.layer].sum(-1))
        return Score(**measured)

    every = [score(Site(layer, (head,))) for layer in range(layers) for head in range(heads)]
    typical = float(np.median(pair_mass.mean(0)))
    every = [s.model_copy(update={"role": roles.role(s, pairs, typical)}) for s in every]
    return Ranking(
        provenance=provenance(name, fingerprint(base), seed, recipe),
        probe={"name": "kv", "pairs": pairs, "examples": examples, "seed": seed, "threads": torch.get_num_threads()},
        base_accuracy=mean(correct["base", None]),
        base_loss=mean(losses["base", None]),
        heads=tuple(sorted(every, key=gain, reverse=True)),
        layers=tuple(score(Site(layer)) for layer in range(layers)),
    )
