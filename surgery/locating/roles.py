"""What a head's mixing matrix says about its role.

answer_mass: of the weight that the query position (the prompt's last token) puts on the pairs' summaries, the share of the pair
that holds the answer. An aggregate head picks it out; a head that does not know the answer has 1 / pairs. (A pair is a span of
the question: a line of the dictionary or phone book, a lettered option.)
pair_mass: of the weight with which a pair's end mixes the past, the share that falls on the pair, averaged over pairs. A gather
head condenses a segment into its end, so it draws most of its weight from within.

Where a pair ends: causal models often finish a segment's summary on the token after it (the next line's key), so the end is
that token, and the summary may sit anywhere from the pair's second token to its end.

Weight is the absolute value of the head's mixing matrix (of an SSM head, time step included, D not; see matrices.py).
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.locating.matrices import mixing_matrices
from surgery.locating.ranking import Role, Score
from surgery.models.anatomy import Anatomy, anatomy
from surgery.models.tokens import opening
from surgery.probes.question import Question
from surgery.records.site import Site
from surgery.runtime import processes

COST = 0.001  # nats; where a base is all but certain of its answers, far less than that is beyond chance


def token_spans(tokenizer: PreTrainedTokenizerBase, question: Question) -> tuple[list[int], list[list[int]]]:
    """The prompt's token ids, and for every span of the question the positions of its tokens."""
    (ids,) = opening(tokenizer, [question.prompt])
    offsets = tokenizer(question.prompt, return_offsets_mapping=True)["offset_mapping"][: len(ids)]
    spans = [
        [i for i, (start, end) in enumerate(offsets) if start < stop and end > begin and end > start]
        for begin, stop in question.spans
    ]
    return ids, spans


def masses(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    *,
    found: Anatomy | None = None,
    sites: Collection[Site] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(answer_mass, pair_mass), both (questions, layers, most heads). Several processes share the questions.

    NaN for heads that are not asked for (default: all are), that a layer lacks, or whose matrix cannot be had; for questions
    without spans and evidence; and, as answer_mass, for those with a single span, which leaves nothing to pick from.
    """
    found = found or anatomy(base)
    layers = len(found.blocks)
    shape = (len(questions), layers, max(found.heads(layer) for layer in range(layers)))
    answer, pair = np.full(shape, np.nan), np.full(shape, np.nan)
    for q in processes.share(range(len(questions))):
        question = questions[q]
        if question.evidence is None or not question.spans:
            continue
        tokens, spans = token_spans(tokenizer, question)
        summaries = [[*span[1:], span[-1] + 1] for span in spans]
        # Row 0: the query position; then the end of every pair.
        rows = torch.tensor([len(tokens) - 1, *(summary[-1] for summary in summaries)], device=base.device)
        every = mixing_matrices(base, found, torch.tensor(tokens, device=base.device), rows, sites)
        if not every:
            continue
        weight = torch.stack(list(every.values())).abs().float().cpu()  # heads, rows, t
        share = weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
        on_pairs = torch.stack([weight[:, 0, summary].sum(-1) for summary in summaries])  # pairs, heads
        at = q, [site.layer for site in every], [site.heads[0] for site in every]
        if len(spans) > 1:
            answer[at] = on_pairs[question.evidence] / on_pairs.sum(0).clamp_min(torch.finfo(weight.dtype).tiny)
        pair[at] = torch.stack([share[:, 1 + i, span].sum(-1) for i, span in enumerate(spans)]).mean(0)
    mine = [(q, answer[q], pair[q]) for q in processes.share(range(len(questions)))]
    for q, of_answer, of_pair in processes.gather(mine):
        answer[q], pair[q] = of_answer, of_pair
    return answer, pair


def role(score: Score, low: Mapping[str, float], chance: float, typical_pair_mass: float) -> Role | None:
    """What a head does for retrieval, as the paper means it: a head that the model can do without has no role.

    aggregate: ablating the head costs loss (beyond chance, and at least COST), its query picks out the answer's span by more
    than chance (1 by the number of spans), and splicing it gains accuracy, where that was measured.
    gather: ablating it costs loss, a span's end draws on its span by more than in the typical (median) head, and no gain from
    splicing shows, not even in the head's own 95% interval. Where a family has no grafts, what is no aggregate head may be one.

    low: Score's field -> the lower end of its interval, corrected for the number of heads (NaN: not measured), so that the
    chance that any head of the model has a role by accident is at most 5%.

    None does not mean that a head is no place for a graft. Aggregate heads that stand in for each other cost little when one of
    them is ablated, and have no role; splice_gain and splice_loss, by which heads are ranked and planned, find them all the
    same.
    """
    if not low["ablation_loss"] > 0 or score.ablation_loss is None or score.ablation_loss.value < COST:
        return None
    if low["answer_mass"] > chance and (score.splice_gain is None or low["splice_gain"] > 0):
        return "aggregate"
    if low["pair_mass"] > typical_pair_mass and (score.splice_gain is None or score.splice_gain.ci95[0] <= 0):
        return "gather"
    return None
