"""mixing.json: what a head's mixing matrix was before surgery and is after it, over the tokens of one example."""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.evaluation.bench import Entry
from surgery.locating.atlas import example
from surgery.locating.roles import token_spans
from surgery.models.anatomy import anatomy
from surgery.probes.question import Question
from surgery.records.plan import Plan
from surgery.records.record import Provenance, Record
from surgery.records.site import Site, SiteText
from surgery.splicing.splice import adopt

MOST_SITES = 4  # in a figure; the rest of a plan's heads look alike
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
        held = np.frombuffer(b64decode(self.rows), dtype=np.uint8)
        t = int((np.sqrt(8 * len(held) + 1) - 1) / 2)
        matrix = np.zeros((t, t))
        matrix[np.tril_indices(t)] = (held / 255.0) ** 2
        return matrix


class Panel(Record):
    """One site in several models, the base first. heads: where the site is a layer, of how many heads each is the mean."""

    site: SiteText
    heads: dict[str, int] = {}
    models: dict[str, Weights]


class Mixing(Record):
    """tokens: the example's. answer: which of them hold the answer."""

    provenance: Provenance
    tokens: tuple[str, ...]
    answer: tuple[int, ...]
    panels: tuple[Panel, ...]


def mixing(
    entries: Mapping[str, Entry], tokenizer: PreTrainedTokenizerBase, question: Question, made: Provenance,
    order: Sequence[Site] = (),
) -> Mixing | None:  # fmt: skip
    """The matrices of the first few grafted sites, in the base (the first entry) and in every model that has a graft there, but
    for controls and doses. order: of the sites, the most telling first. None where there is no graft or no matrix
    to be had, or the example too long."""
    (base, first), *others = entries.items()
    grafted = {name: e for name, e in others if e.plan is not None and not name.startswith(("control", "dose_"))}
    sites = dict.fromkeys(site for entry in grafted.values() for site in _parts(entry.plan))
    place = {site: i for i, site in enumerate(order)}
    chosen = sorted(sites, key=lambda site: place.get(site, len(place)))[:MOST_SITES]
    ids, spans = token_spans(tokenizer, question)
    if not chosen or len(ids) > MOST_TOKENS:
        return None
    answer = () if question.evidence is None else tuple(spans[question.evidence])
    panels: list[Panel] = []
    tokens: tuple[str, ...] = ()
    for site in chosen:
        models, heads = {}, {}
        for name, entry in {base: first, **{n: e for n, e in grafted.items() if site in _parts(e.plan)}}.items():
            labels, shares, count = _shares(entry.model, tokenizer, site, question)
            if shares is not None:
                tokens = tuple(labels)
                models[name] = _weights(shares, answer)
                if not site.heads:
                    heads[name] = count
        if len(models) > 1 and base in models:
            panels.append(Panel(site=site, heads=heads, models=models))
    return Mixing(provenance=made, tokens=tokens, answer=answer, panels=tuple(panels)) if panels else None


def _parts(plan: Plan | None) -> list[Site]:
    """A plan's heads, or its layers."""
    return [part for site in (plan.sites if plan else ()) for part in (site.each() or (site,))]


def _shares(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, site: Site, question: Question
) -> tuple[list[str], Tensor | None, int]:
    """Tokens; how each row divides its weight (t, t), of a layer the mean of its heads; of how many heads that is."""
    every = site.each()
    if not every:
        numbers = range(anatomy(adopt(model)).heads(site.layer))
        every = tuple(Site(site.layer, (head,)) for head in numbers[:: -(-len(numbers) // MOST_HEADS)])
    labels, matrices = example(model, tokenizer, every, question)
    if not matrices:
        return labels, None, 0
    weight = torch.stack([matrix.abs().float().cpu() for matrix in matrices.values()])
    share = weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
    return labels, share.mean(0), len(matrices)


def _weights(shares: Tensor, answer: tuple[int, ...]) -> Weights:
    lower = shares.numpy()[np.tril_indices(len(shares))]
    rows = b64encode(np.round(255 * np.sqrt(lower)).astype(np.uint8).tobytes()).decode()
    return Weights(rows=rows, answer=float(shares[-1, list(answer)].sum()) if answer else None)
