"""Exact ablation and splicing of heads, sharing all the work that they share (see replay.py).

At each layer the mixer's scan and its dual attention are computed for all heads together; a variant (one head ablated, or
spliced) changes that layer's output and runs the layers above alone.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.locating.replay import Change, How, Layer, Replay
from surgery.models.anatomy import Anatomy, anatomy
from surgery.records.plan import Plan, Start
from surgery.records.site import Site
from surgery.splicing.splice import install


@dataclass(frozen=True)
class Variant:
    """The base with one change, and the logits (rows, vocabulary) at the rows' last tokens. `site` None: no change."""

    kind: str  # "base", "ablate" or "splice"
    site: Site | None
    logits: Tensor


def fully_gated(base: PreTrainedModel, layers: int, heads: int, starts: dict[str, Start] | None = None) -> PreTrainedModel:
    """The base with a dual graft at every head, all blend gates at 0. It computes what the base computes."""
    everywhere = tuple(Site(layer, tuple(range(heads))) for layer in range(layers))
    return install(base, Plan(sites=everywhere, starts=starts or {}, shared=True, blend=0.0)).eval()


@torch.inference_mode()
def variants(
    base: PreTrainedModel,
    gated: PreTrainedModel | None,
    ids: Tensor,
    last: Tensor,
    *,
    found: Anatomy | None = None,
    layers: bool = True,
    heads: Collection[Site] | None = None,
    kinds: Collection[str] = ("ablate", "splice"),
    how: How = "zero",
    reference: tuple[Tensor, Tensor] | None = None,
    donors: Tensor | None = None,
    stack: int = 1,
) -> Iterator[Variant]:
    """First the base itself, then layers (or none of them) and heads (all, or the given ones) ablated and spliced.

    base: a graftable one adopted, or any model that has an anatomy. gated: the same, fully gated; None: nothing is spliced.
    ids (rows, t), padded on the right; last (rows,): each row's last token. how, reference, donors: as for Replay and
    Layer.ablation. stack: variants computed in one batch, which serves a GPU.
    """
    found = found or anatomy(base)
    grafted = None if gated is None else anatomy(gated)
    for layer in Replay(base, found, ids, last, reference=reference, donors=donors).layers():
        if layer.index == 0:
            yield Variant("base", None, layer.base)
        sites = [Site(layer.index, (head,)) for head in range(found.heads(layer.index))]
        wanted = sites if heads is None else [site for site in sites if site in heads]
        if sites and layers:
            wanted = [Site(layer.index), *wanted]
        changes = _changes(layer, wanted, grafted, kinds, how)
        while stacked := list(islice(changes, stack)):
            every = layer.logits(*(change for _, _, change in stacked))
            for (kind, site, _), logits in zip(stacked, every, strict=True):
                yield Variant(kind, site, logits)


def _changes(
    layer: Layer, sites: list[Site], grafted: Anatomy | None, kinds: Collection[str], how: How
) -> Iterator[tuple[str, Site, Change]]:
    """(kind, site, change) for every site, one after the other, so that few tensors are held at a time."""
    splicing = grafted is not None and "splice" in kinds
    if sites and splicing:
        assert grafted is not None
        (mixer,) = (m.module for m in grafted.at(layer.index))
        y, attended, gate = (layer.take(part) for part in mixer.halves(layer.entering[0]))  # type: ignore[operator]
    for site in sites:
        if "ablate" in kinds:
            yield "ablate", site, layer.ablation(site.heads or None, how)
        if splicing:
            changed = y.clone()
            chosen = list(site.heads) or slice(None)
            changed[..., chosen, :] = attended[..., chosen, :].to(y.dtype)  # in half precision, one may be in float32
            yield "splice", site, layer.replacement(mixer.finish(changed, gate))  # type: ignore[operator]
