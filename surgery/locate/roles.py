"""What a head's mixing matrix says about its role.

answer_mass: of the weight that the query position (the prompt's last token) puts on the pairs' summaries, the share of the pair
that holds the answer. An aggregate head picks it out; a head that does not know the answer has 1 / pairs.
pair_mass: of the weight with which a pair's end mixes the past, the share that falls on the pair, averaged over pairs. A gather
head condenses a segment into its end, so it draws most of its weight from within.

Where a pair ends: causal models often finish a segment's summary on the token after it (the next line's key), so the end is
that token, and the summary may sit anywhere from the pair's second token to its end.

Weight is the absolute value of the mixing matrix of the base's SSM head, time step included, D not.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.families import Hybrid
from surgery.kernels.mixing import attention_matrix, ssd_matrix
from surgery.locate.ranking import Role, Score
from surgery.probes.question import Question


def token_spans(tokenizer: PreTrainedTokenizerBase, question: Question) -> tuple[list[int], list[list[int]]]:
    """The prompt's token ids, and for every span of the question the positions of its tokens."""
    encoded = tokenizer(question.prompt, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    spans = [
        [i for i, (start, end) in enumerate(offsets) if start < stop and end > begin and end > start]
        for begin, stop in question.spans
    ]
    return encoded["input_ids"], spans


@torch.inference_mode()
def mixing_matrices(base: Hybrid, ids: Tensor, rows: Tensor | None = None) -> list[Tensor]:
    """For every layer of an adopted base or hybrid, the mixing matrices of all heads: (heads, rows, t), for one sequence.

    SSM heads: time step included, D not. Grafted heads: their attention (where a blend gate is open, the mixture).
    """
    out, hidden = [], base.backbone.embeddings(ids[None])
    for block in base.backbone.layers:
        mixer = block.mixer
        gate, x, B, C, dt, qk = mixer.project(block.norm(hidden.to(block.norm.weight.dtype)))
        matrix = ssd_matrix(dt, -torch.exp(mixer.A_log.float()), B, C, rows=rows)[0]
        if mixer.graft is not None:
            graft = mixer.graft
            attention = graft.sign(matrix) * attention_matrix(*graft.split(qk, dt), rows=rows)[0].to(matrix.dtype)
            share = 1.0 if graft.gate is None else graft.gate[:, None, None]
            matrix[graft.heads] = (1 - share) * matrix[graft.heads] + share * attention
        out.append(matrix)
        residual = hidden.to(torch.float32) if block.residual_in_fp32 else hidden
        hidden = residual + mixer.finish(mixer.mix(x, B, C, dt, qk), gate)
    return out


def masses(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[Question]
) -> tuple[np.ndarray, np.ndarray]:
    """(answer_mass, pair_mass), both (questions, layers, heads), for questions with spans and evidence."""
    answer, pair = [], []
    for question in questions:
        assert question.evidence is not None
        tokens, spans = token_spans(tokenizer, question)
        summaries = [[*span[1:], span[-1] + 1] for span in spans]
        # Row 0: the query position; then the end of every pair.
        rows = torch.tensor([len(tokens) - 1, *(summary[-1] for summary in summaries)], device=base.device)
        layers = mixing_matrices(base, torch.tensor(tokens, device=base.device), rows)
        weight = torch.stack(layers).abs().float().cpu()  # layers, heads, rows, t
        share = weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
        on_pairs = torch.stack([weight[:, :, 0, summary].sum(-1) for summary in summaries])  # pairs, layers, heads
        answer.append(on_pairs[question.evidence] / on_pairs.sum(0).clamp_min(torch.finfo(weight.dtype).tiny))
        pair.append(torch.stack([share[:, :, 1 + i, span].sum(-1) for i, span in enumerate(spans)]).mean(0))
    return torch.stack(answer).numpy(), torch.stack(pair).numpy()


def role(score: Score, pairs: int, typical_pair_mass: float) -> Role | None:
    """aggregate: splicing gains accuracy, and of the pairs the head's query picks out the answer's (more than 1 / pairs).
    gather: ablating costs loss, splicing gains nothing, and a pair's end draws on its pair more than in the typical (median)
    head. Neither: None. Every comparison is beyond the 95% interval."""
    if score.ablation_loss is None or score.splice_gain is None or score.answer_mass is None or score.pair_mass is None:
        return None
    if score.splice_gain.ci95[0] > 0 and score.answer_mass.ci95[0] > 1 / pairs:
        return "aggregate"
    if score.ablation_loss.ci95[0] > 0 >= score.splice_gain.ci95[0] and score.pair_mass.ci95[0] > typical_pair_mass:
        return "gather"
    return None
