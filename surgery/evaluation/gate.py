"""How a hybrid's grafts behave on held-out text: where they act, and how far the text's predictions move from the base's."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from surgery.evaluation.statistics import estimate
from surgery.evaluation.texts import by_document, rows_at_once
from surgery.modeling.graft import Graft, watched
from surgery.records.ranking import Estimate
from surgery.records.report import OnText


@torch.inference_mode()
def measure_on_text(base: Any, model: Any, rows: Tensor, owner: np.ndarray, batch: int) -> OnText:
    """Compare a model with its base on rows of text (n, t), of which each belongs to the document owner[row].

    base: in the same code and precision as the model, so that equal numbers are equal bit for bit (splice.adopt gives it).
    """
    grafts = [module for module in model.modules() if isinstance(module, Graft)]
    kl, acts = np.zeros(tuple(rows.shape)), np.zeros(tuple(rows.shape))
    same, before = np.ones(len(rows), dtype=bool), 0.0
    shares: list[Tensor] = []  # of each graft, (b, t, heads), of the last forward
    batch = rows_at_once(model, rows.shape[1], batch)
    for start in range(0, len(rows), batch):
        ids, part = rows[start : start + batch].to(model.device), slice(start, start + batch)
        expected = base(input_ids=ids, use_cache=False).logits
        shares.clear()
        with watched(grafts, lambda _, m: shares.append(m)):
            logits = model(input_ids=ids, use_cache=False).logits.to(expected.device)
        log_p, log_q = expected.float().log_softmax(-1), logits.float().log_softmax(-1)
        kl[part] = (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0).double().cpu().numpy()
        change = (logits.float() - expected.float()).abs().amax(-1).cpu()
        same[part] = (change == 0).all(1).numpy()
        if grafts:
            is_open = torch.stack([(m > 0).any(-1).cpu() for m in shares]).any(0)
            acts[part] = is_open.numpy()
            before = max(before, float((change * (is_open.cumsum(1) == 0)).max()))
    untouched = [bool(same[owner == each].all()) for each in range(int(owner.max()) + 1)]
    return OnText(
        kl=_within(estimate(by_document(kl, owner), decisions=False), np.inf),
        documents=len(untouched),
        tokens=rows.numel(),
        untouched=sum(untouched),
        acts=_within(estimate(by_document(acts, owner), decisions=False), 1.0) if grafts else None,
        change_before=before if grafts else None,
    )


def _within(found: Estimate, most: float) -> Estimate:
    """An estimate whose interval stays where values can be: from 0 on."""
    return found.model_copy(update={"low": max(found.low, 0.0), "high": min(found.high, most)})
