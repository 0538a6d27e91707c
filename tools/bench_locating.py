"""Measures how long locating takes, compared with the methods that it replaces.

`locate_exact`: every head is ablated and spliced, by locate's own walk, and by the published method with one whole forward for
every candidate answer of every head. `locate_confirmed`: attribution of all heads with exact confirmation of the leading tenth,
and the exact ablation of all heads. Weights are random: the amount of work does not depend on them.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.families import Hybrid
from surgery.locating.attribution import attribute_starts, best_starts
from surgery.locating.exact import Exact
from surgery.locating.questions import QuestionSet
from surgery.locating.search import LEADING
from surgery.locating.subject import Subject
from surgery.locating.substitution import ablate_heads
from surgery.locating.walk import fully_gated
from surgery.probes.encoded import padded
from surgery.probes.kv import KVRetrieval
from surgery.probes.scoring import batches
from surgery.records.site import Site
from surgery.world.tokenizer import build_tokenizer
from tools import bench_shapes as shapes
from tools.turns import Runs

SHARE = 0.1  # of all heads: those that are confirmed


def exact_against_published(device: torch.device, *, pairs: int = 32, examples: int = 4) -> Callable[[], Runs]:
    """Both contenders return the same scores, (2 * sites, examples): the right answer's loss, first with every site ablated,
    then with every site spliced."""

    def make() -> Runs:
        subject, questions = _subject("tiny-mamba2", device, pairs, examples)
        sites, gated = subject.anatomy.sites(), fully_gated(subject)

        def ours() -> Tensor:
            measured = Exact(subject, questions, gated=gated)
            measured.measure(None, layers=False)
            ((chosen, _),) = questions.groups
            losses = [measured.losses[kind, site][chosen] for kind in ("ablate", "splice") for site in sites]
            return torch.from_numpy(np.stack(losses))

        @torch.inference_mode()
        def published() -> Tensor:
            ((_, encoded),) = questions.groups
            losses, hybrid = [], cast(Hybrid, gated.model)
            for site in sites:
                with ablate_heads(subject.anatomy, [site]):
                    losses.append(_one_candidate_at_a_time(subject.model, encoded))
            for site in sites:
                gate = hybrid.backbone.layers[site.layer].mixer.graft.gate
                gate[site.heads[0]] = 1
                losses.append(_one_candidate_at_a_time(hybrid, encoded))
                gate[site.heads[0]] = 0
            return torch.stack(losses).double()

        return {"ours": ours, "published": published}

    return make


def confirmed_against_exact(device: torch.device, *, pairs: int = 4, examples: int = 4) -> Callable[[], Runs]:
    """At the mamba2-130m shape. Batches hold one example each, so that there are more than two: from the third batch on, locate
    drops the heads that can no longer lead. Both contenders have its other savings."""

    def make() -> Runs:
        subject, questions = _subject("mamba2-130m", device, pairs, examples, batch_size=1)
        sites, heads = subject.anatomy.sites(), subject.anatomy.heads(0)

        def ours() -> Any:
            ungated = fully_gated(subject)
            of_batches = torch.stack([attribute_starts(ungated, encoded).sum(1) for _, encoded in questions.groups])
            attributions = of_batches.sum(0)  # starts, layers, heads
            best = attributions.amax(0).flatten().argsort(descending=True)[: round(SHARE * len(sites))]
            gated = fully_gated(subject, best_starts(attributions))
            leading = [Site(int(i) // heads, (int(i) % heads,)) for i in best]
            Exact(subject, questions, gated=gated).measure(leading, layers=False, kinds=("splice",), leading=LEADING)

        def exact() -> Any:
            Exact(subject, questions).measure(None, layers=False, kinds=("ablate",))

        return {"ours": ours, "exact": exact}

    return make


def _subject(
    name: str, device: torch.device, pairs: int, examples: int, batch_size: int | None = None
) -> tuple[Subject, QuestionSet]:
    subject = Subject.of(shapes.BASES[name]().to(device), build_tokenizer(), name)
    for p in subject.model.parameters():
        p.requires_grad_(False)
    questions = KVRetrieval(pairs).questions(examples, seed=0)
    groups = list(batches(subject.tokenizer, questions, batch_size or examples))
    return subject, QuestionSet("kv", {"pairs": pairs}, 0, questions, groups)


def _one_candidate_at_a_time(model: PreTrainedModel, encoded: Any) -> Tensor:
    """The right answer's loss among the candidates, (questions,), with one forward for every candidate."""
    ids, last = padded(encoded.rows, model.device)
    rows = torch.arange(len(ids), device=ids.device)
    scores = []
    for choice in range(int(encoded.choices.max())):
        _, _, row, token = encoded.terms[encoded.terms[:, 1] == choice].to(ids.device).unbind(1)
        logits = model(input_ids=ids, use_cache=False).logits[rows, last]
        scores.append(logits.float().log_softmax(-1)[row, token])
    all_scores = torch.stack(scores, 1)
    return all_scores.logsumexp(-1) - all_scores.gather(1, encoded.answers.to(ids.device)[:, None])[:, 0]
