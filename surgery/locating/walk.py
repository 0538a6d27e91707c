"""Exact ablation and splicing of heads, sharing all the work that they share (see replay.py).

At each layer the mixer's scan and its dual attention are computed for all heads together; a variant (one head ablated, or
spliced) changes that layer's output and runs the layers above alone.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surgery.locating.replay import Change, How, Layer, Replay
from surgery.locating.subject import Subject
from surgery.models.anatomy import Anatomy, anatomy
from surgery.records.plan import Plan, Start
from surgery.records.site import Site
from surgery.splicing.splice import install


@dataclass(frozen=True)
class Variant:
    """The base with one change, and the logits (logits, vocabulary) where the replay looks at them. `site` None: no change."""

    kind: str  # "base", "ablate" or "splice"
    site: Site | None
    logits: Tensor


def fully_gated(subject: Subject, starts: dict[str, Start] | None = None) -> Subject:
    """A graftable subject with a graft at every head of an SSM, all blend gates at 0. It computes what the subject does.

    starts: by head ("L1.H3"); sign 1 and scale 1 where none is named.
    """
    everywhere = tuple(Site(mixer.layer, tuple(range(mixer.heads))) for mixer in subject.anatomy.ssms)
    gated = install(
        subject.model, Plan(sites=everywhere, starts=starts or {}, shared=True, blend=0.0, init=subject.init)
    ).eval()
    return replace(subject, model=gated, anatomy=anatomy(gated))


@torch.no_grad()
def set_starts(gated: Subject, starts: dict[str, Start]) -> None:
    """Give the grafts of a subject that was gated without starts their own, by head. Channels that share a pair have one."""
    for place in gated.anatomy.ssms:
        graft: Any = place.module.graft
        heads = [graft.heads[pair[0]] for pair in graft.pairs] if hasattr(graft, "pairs") else graft.heads
        chosen = [starts[f"L{place.layer}.H{head}"] for head in heads]
        graft.signs = [start.sign for start in chosen]
        graft.log_tau += torch.tensor([start.tau for start in chosen]).log().to(graft.log_tau)


@torch.inference_mode()
def variants(
    replay: Replay,
    gated: Subject | None = None,
    *,
    layers: bool = True,
    heads: Collection[Site] | None = None,
    kinds: Collection[str] = ("ablate", "splice"),
    how: How = "zero",
) -> Iterator[Variant]:
    """First the base itself, then its layers (or none of them) and heads (all, or the given ones) ablated and spliced.

    replay: of a batch. gated: the replay's subject, fully gated; None: nothing is spliced. Heads of attention are only
    ablated. how: as for Layer.ablation.
    """
    grafted, anatomy = None if gated is None else gated.anatomy, replay.subject.anatomy
    given: dict[int, list[Site]] = defaultdict(list)
    for site in () if heads is None else sorted(heads):
        given[site.layer].append(site)
    for layer in replay.layers():
        if layer.index == 0:
            yield Variant("base", None, layer.base)
        count = anatomy.heads(layer.index)
        sites = [Site(layer.index, (head,)) for head in range(count)] if heads is None else given[layer.index]
        if count and layers:
            sites = [Site(layer.index), *sites]
        for kind, site, change in _changes(layer, sites, grafted, kinds, how):
            yield Variant(kind, site, layer.logits(change))


def _changes(
    layer: Layer, sites: list[Site], grafted: Anatomy | None, kinds: Collection[str], how: How
) -> Iterator[tuple[str, Site, Change]]:
    """(kind, site, change) for every site, one after the other, so that few tensors are held at a time."""
    spliced = grafted.ssm(layer.index) if grafted is not None and "splice" in kinds else None
    if sites and spliced is not None:
        mixer: Any = spliced.module  # a Mixer
        number = layer.mixers.index(next(m for m in layer.mixers if m.kind == "ssm"))
        y, attended, gate = (layer.take(part) for part in mixer.halves(layer.entering[number]))
    for site in sites:
        if "ablate" in kinds:
            yield "ablate", site, layer.ablation(site.heads or None, how)
        if spliced is not None and all(head < spliced.heads for head in site.heads):
            changed = y.clone()
            chosen = list(site.heads) or slice(None)
            changed[..., chosen, :] = attended[..., chosen, :].to(y.dtype)  # in half precision, one may be in float32
            yield "splice", site, layer.replacement(mixer.finish(changed, gate), number)
