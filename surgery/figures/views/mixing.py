"""What a head's mixing matrix was before surgery and is after it, over the tokens of one example: mixing.json, grafts.png. And
mixing.png: the matrices of the leading heads of a ranking.

A graft with a gate is shown twice: its own attention, and the mixture of SSM and attention that the gate makes of it.
"""

import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.entries import Entry, ModelPool
from surgery.evaluation.report import Report
from surgery.evaluation.views import MeasuredModels
from surgery.figures import plotting
from surgery.figures.example import example_matrices, example_tokens, short_question, window
from surgery.figures.mixing_figure import Strips, draw_mixing, draw_strips
from surgery.figures.ranking_of import ranking_of
from surgery.figures.views.atlas import parts
from surgery.loading.opened import Checkpoint
from surgery.locating.ranked_heads import RankedHeads
from surgery.locating.subject import Subject
from surgery.probes.encoded import Asked
from surgery.records.names import is_control
from surgery.records.record import Provenance, Record
from surgery.records.site import Site, SiteText

FILES = {"located": ["mixing.png"], "measured": ["mixing.json", "grafts.png"]}
RECORD = "mixing.json"
MOST_SITES = 4  # in the page; the rest of a plan's heads look alike
MOST_DRAWN = 2  # in the PNG
MOST_HEADS = 32  # of a layer, for its mean: a layer of Mamba-1 has thousands
MOST_TOKENS = 300  # a figure of more shows nothing


class Weights(Record):
    """A mixing matrix (t, t), of which is kept how each row divides its weight |M|. rows: the lower triangle row by row, a byte
    an entry, base64; a byte b stands for the share (b / 255)^2. answer: the share of the last row on the tokens that hold the
    answer, as measured; None for an example without such."""

    rows: str
    answer: float | None

    def shares(self) -> np.ndarray:
        """(t, t), to the precision of a byte."""
        entries = np.frombuffer(b64decode(self.rows), dtype=np.uint8)
        t = int((np.sqrt(8 * len(entries) + 1) - 1) / 2)
        matrix = np.zeros((t, t))
        matrix[np.tril_indices(t)] = (entries / 255.0) ** 2
        return matrix


class Panel(Record):
    """One site in several models, the base first. models: what the head does there, the mixture where a gate is. attention: the
    graft's own, for models with a gate; gates: how much of the mixture it is. heads: where the site is a layer, of how many
    heads each is the mean."""

    site: SiteText
    heads: dict[str, int] = {}
    models: dict[str, Weights]
    attention: dict[str, Weights] = {}
    gates: dict[str, float] = {}

    def views(self) -> list[tuple[str, str, Weights]]:
        """Model, what is shown of it, and the matrix: the base, then of every hybrid the attention and, if any, the mixture."""
        base, *hybrids = self.models
        views = [(base, "before surgery", self.models[base])]
        for name in hybrids:
            views.append((name, "the graft's own attention", self.attention.get(name, self.models[name])))
            if name in self.attention:
                views.append((name, f"the mixture, {100 * self.gates[name]:.0f}% attention", self.models[name]))
        return views


class Mixing(Record):
    """tokens: the example's. spans: of each the positions of its tokens. answer: which tokens hold the answer."""

    provenance: Provenance
    tokens: tuple[str, ...]
    spans: tuple[tuple[int, ...], ...] = ()
    answer: tuple[int, ...]
    panels: tuple[Panel, ...]


def located(base: Checkpoint, ranking: RankedHeads, out: Path) -> None:
    """mixing.png: the leading heads."""
    draw_mixing(base.model, base.tokenizer, ranking, out / "mixing.png")


def measured(what: MeasuredModels, out: Path) -> None:
    """mixing.json and grafts.png."""
    report, tokenizer, asked = what.report, what.base.tokenizer, what.recipe.locate
    example = short_question(tokenizer, asked.probe, asked.options, what.recipe.seed)
    ranking = ranking_of(report, out) if report.plan is not None else None
    places = None if ranking is None else ranking.columns.find
    matrices = mixing(what.entries, tokenizer, example, report.provenance, places)
    if matrices is not None:
        matrices.write(out / RECORD)
        draw_grafts(matrices, out / "grafts.png")


def mixing_of(report: Report, out: Path) -> Mixing | None:
    """What `measured` has written there, if it belongs to this report."""
    if not (out / RECORD).exists():
        return None
    try:
        matrices = Mixing.read(out / RECORD)
    except UserError:  # damaged, or of another version
        return None
    return matrices if matrices.provenance == report.provenance else None


def mixing(
    entries: Mapping[str, Entry], tokenizer: PreTrainedTokenizerBase, question: Asked, provenance: Provenance,
    places: Callable[[Sequence[Site]], Sequence[int | None]] | None = None,
) -> Mixing | None:  # fmt: skip
    """The matrices of the first few grafted sites, in the base (the first entry) and in every model that has a graft there,
    except controls. places: where sites are, the most telling first; None for one that occurs nowhere. Returns None where there
    is no graft or no matrix to be had, or the example is too long."""
    (base, first), *others = entries.items()
    grafted = {name: entry for name, entry in others if entry.plan is not None and not is_control(name)}
    sites = list(dict.fromkeys(site for entry in grafted.values() for site in parts(entry.plan)))
    place = dict(zip(sites, places(sites), strict=True)) if places else {}
    chosen = sorted(sites, key=lambda site: math.inf if (i := place.get(site)) is None else i)[:MOST_SITES]
    ids, tokens, spans, answer = example_tokens(tokenizer, question)
    if not chosen or len(ids) > MOST_TOKENS:
        return None
    models, seen = ModelPool({base: first, **grafted}), dict[tuple[Site, str], _Seen]()
    for name in models:
        subject = Subject.of(models[name], tokenizer)
        for site in chosen:
            if (name == base or site in parts(grafted[name].plan)) and (view := _seen(subject, site, ids, answer)):
                seen[site, name] = view
        del subject  # before the next model is opened
    views = {site: {name: seen[site, name] for name in models if (site, name) in seen} for site in chosen}
    panels = [_panel(site, of_site) for site, of_site in views.items() if len(of_site) > 1 and base in of_site]
    if not panels:
        return None
    return Mixing(provenance=provenance, tokens=tuple(tokens), spans=tuple(spans), answer=answer, panels=tuple(panels))


def draw_grafts(mixing: Mixing, path: Path) -> None:
    """grafts.png: of the first grafted heads the base's mixing, and the attention and the mixture of the last model, over the
    part of the example where the answer is read."""
    part, groups = window(mixing.tokens, mixing.spans, mixing.answer), []
    for panel in mixing.panels[:MOST_DRAWN]:
        first, *_, last = panel.models
        views = [
            (f"{panel.site} of {plotting.shown(name)}: {what}", weights.answer, weights.shares())
            for name, what, weights in panel.views()
            if name in (first, last)
        ]
        groups.append(Strips(mixing.tokens, part, views))
    draw_strips(groups, path)


class _Seen(NamedTuple):
    """What is seen of a site in one model. heads: of how many its matrix is the mean. attention, gate: if it has a gate."""

    weights: Weights
    heads: int
    attention: Weights | None = None
    gate: float | None = None


def _seen(subject: Subject, site: Site, ids: Sequence[int], answer: tuple[int, ...]) -> _Seen | None:
    shares, count = _shares(subject, site, ids)
    if shares is None:
        return None
    with _gate_open(subject, site) as gate:
        if gate is None:
            return _Seen(_weights(shares, answer), count)
        own, _ = _shares(subject, site, ids)
        assert own is not None
        return _Seen(_weights(shares, answer), count, _weights(own, answer), gate)


def _panel(site: Site, views: Mapping[str, _Seen]) -> Panel:
    return Panel(
        site=site,
        heads={} if site.heads else {name: view.heads for name, view in views.items()},
        models={name: view.weights for name, view in views.items()},
        attention={name: view.attention for name, view in views.items() if view.attention is not None},
        gates={name: view.gate for name, view in views.items() if view.gate is not None},
    )


@contextmanager
def _gate_open(subject: Subject, site: Site) -> Iterator[float | None]:
    """The gates of a site's layer fully open: its grafted heads are attention alone. Yields what the site's gate was, or None
    for a site without a gate."""
    graft: Any = getattr(subject.anatomy.mixer_of(site).module, "graft", None) if site.heads else None
    gate = getattr(graft, "gate", None)
    if gate is None or gate.is_meta or site.heads[0] not in graft.heads:  # meta: on disk, and nothing else would be read
        yield None
        return
    graft.gate = torch.nn.Parameter(torch.ones_like(gate), requires_grad=False)
    try:
        yield float(gate[graft.heads.index(site.heads[0])].detach())
    finally:
        graft.gate = gate


def _shares(subject: Subject, site: Site, ids: Sequence[int]) -> tuple[Tensor | None, int]:
    """How each row divides its weight (t, t), of a layer the mean of its heads; of how many heads that is."""
    heads = site.each()
    if not heads:
        numbers = range(subject.anatomy.heads(site.layer))
        heads = tuple(Site(site.layer, (head,)) for head in numbers[:: -(-len(numbers) // MOST_HEADS)])
    matrices = example_matrices(subject, ids, heads)
    if not matrices:
        return None, 0
    weight = torch.stack([matrix.abs().float().cpu() for matrix in matrices.values()])
    share = weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
    return share.mean(0), len(matrices)


def _weights(shares: Tensor, answer: tuple[int, ...]) -> Weights:
    lower = shares.numpy()[np.tril_indices(len(shares))]
    rows = b64encode(np.round(255 * np.sqrt(lower)).astype(np.uint8).tobytes()).decode()
    return Weights(rows=rows, answer=float(shares[-1, list(answer)].sum()) if answer else None)
