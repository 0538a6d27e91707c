"""What a head's mixing matrix says about its role.

Both scores are over the spans of a question: the lines of the dictionary or phone book, the lettered options.

answer_mass: of the weight that the query position (the prompt's last token) puts on the spans' summaries, the share of the span
that holds the answer. An aggregate head picks it out; a head that does not know the answer has 1 / spans.
pair_mass: of the weight with which a span's end mixes the past, the share that falls on the span itself, averaged over spans. A
gather head condenses a segment into its end, so it draws most of its weight from within. (Of a dictionary, a span is a pair.)

Causal models often finish a segment's summary on the token after it (the next line's key). So that token counts as the span's
end, and the summary may sit anywhere from the span's second token to this end (models/tokens.py).

Weight is the absolute value of the head's mixing matrix (of an SSM head, time step included, D not; see matrices.py).
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from surgery.locating.heads import Role, Score
from surgery.locating.matrices import mixing_matrices
from surgery.locating.subject import Subject
from surgery.models.tokens import summary, token_spans
from surgery.probes.encoded import Asked
from surgery.probes.question import Passage
from surgery.records.site import Site
from surgery.runtime import processes

EXAMPLES = 32  # questions that are looked at: matrices vary little between dictionaries
COST = 0.001  # nats; less means nothing, though it can be beyond chance where a base is almost certain of its answers


def masses(
    subject: Subject, questions: Sequence[Asked], sites: Collection[Site] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(answer_mass, pair_mass) of `sites` (all heads, unless given), both (questions, layers, most heads). Several processes
    share the questions.

    NaN for other heads, and where a layer has fewer, or a head no matrix; for questions without spans and evidence; and, as
    answer_mass, for those with a single span, which leaves nothing to pick from.
    """
    anatomy, device = subject.anatomy, subject.model.device
    layers = len(anatomy.blocks)
    shape = (len(questions), layers, max(anatomy.heads(layer) for layer in range(layers)))
    answer, pair = np.full(shape, np.nan), np.full(shape, np.nan)
    if sites is not None and not sites:
        return answer, pair
    for q in processes.share(range(len(questions))):
        question = questions[q]
        if isinstance(question, Passage) or question.evidence is None or not question.spans:
            continue
        tokens, spans = token_spans(subject.tokenizer, question.prompt, question.spans)
        summaries = [summary(span, len(tokens)) for span in spans]
        # Row 0: the query position; then the end of every span.
        rows = torch.tensor([len(tokens) - 1, *(summary[-1] for summary in summaries)], device=device)
        matrices = mixing_matrices(subject, torch.tensor(tokens, device=device), rows, sites)
        if not matrices:
            continue
        weight = torch.stack(list(matrices.values())).abs().float().cpu()  # heads, rows, t
        share = weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
        on_spans = torch.stack([weight[:, 0, summary].sum(-1) for summary in summaries])  # spans, heads
        at = q, [site.layer for site in matrices], [site.heads[0] for site in matrices]
        if len(spans) > 1:
            answer[at] = on_spans[question.evidence] / on_spans.sum(0).clamp_min(torch.finfo(weight.dtype).tiny)
        pair[at] = torch.stack([share[:, 1 + i, span].sum(-1) for i, span in enumerate(spans)]).mean(0)
    mine = [(q, answer[q], pair[q]) for q in processes.share(range(len(questions)))]
    for q, of_answer, of_pair in processes.gather(mine):
        answer[q], pair[q] = of_answer, of_pair
    return answer, pair


def role(score: Score, low: Mapping[str, float], chance: float, typical_pair_mass: float) -> Role | None:
    """What a head does for retrieval, in the paper's sense: a head that the model can do without has no role.

    aggregate: ablating the head costs loss (beyond chance, and at least COST), its query picks out the answer's span by more
    than chance (1 by the number of spans), and splicing it gains accuracy, where that was measured.
    gather: ablating it costs loss, a span's end draws on its span by more than in the typical (median) head, and splicing it
    gains nothing, not even by the head's own 95% interval. In a family without grafts this last condition is left out.

    low: Score's field -> the lower end of its interval, corrected for the number of heads (NaN: not measured), so that the
    chance that any head of the model has a role by accident is at most 5%. typical_pair_mass: the median head's.

    A head without a role may still be a good place for a graft. Aggregate heads that stand in for each other cost little when
    one of them is ablated, and have no role; splice_gain and splice_loss, by which heads are ranked and planned, show them.
    """
    if not low["ablation_loss"] > 0 or score.ablation_loss is None or score.ablation_loss.value < COST:
        return None
    if low["answer_mass"] > chance and (score.splice_gain is None or low["splice_gain"] > 0):
        return "aggregate"
    if low["pair_mass"] > typical_pair_mass and (score.splice_gain is None or score.splice_gain.ci95[0] <= 0):
        return "gather"
    return None
