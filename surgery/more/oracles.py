"""Oracles: what a model would answer if its choice of what to read were perfect.

Retrieval has two parts (gather and aggregate): something reads a span of the prompt, a pair say, into a summary; later a head
picks out the right summary and carries what it holds to where the answer is due. If answers are wrong, either may be to blame.
With a perfect choice, chosen heads attend, at the last token, to one place of the span that holds the answer, or behind it,
alone. This is what the best possible attention would do there, grafted into these heads with all else as it is. If the answer
comes out, what was lost is the choice, and these heads are where a graft, once trained, can give it back. If not, nothing that
is done to their queries and keys alone can help: what they carry does not hold the answer, or nothing above reads it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surgery.errors import UserError
from surgery.locating.attribution import frozen
from surgery.locating.attribution_memory import intercept_ssm_output
from surgery.locating.ledger import Ledger, Tensors
from surgery.locating.subject import Subject
from surgery.models.finite import explained
from surgery.models.tokens import token_spans
from surgery.probes.encoded import Asked, Encoded, padded
from surgery.probes.question import Question
from surgery.probes.scoring import batches
from surgery.records.plan import Plan, Start
from surgery.records.site import Site
from surgery.runtime import processes
from surgery.runtime.progress import counting

# Where a head may read what a span holds, in tokens before the one behind the span: in its last ones, or behind it, where other
# heads may have gathered it. Of kv, the pair and the next one.
PLACES = range(-4, 4)
TRIED = 8  # places and signs of a head that are tried, those that lead to first order


@dataclass(frozen=True)
class OracleHead:
    """A head that attends to one place alone: `back` tokens before the one behind the span that holds the answer; negative:
    after it. sign: of what it puts out."""

    site: Site
    back: int
    sign: int = 1

    def __str__(self) -> str:
        where = f"{self.back} back" if self.back >= 0 else f"{-self.back} ahead"
        return f"{self.site} ({where}{', negative' if self.sign < 0 else ''})"


def plan_at(carriers: Sequence[OracleHead]) -> Plan:
    """Dual grafts at these heads, with the signs with which they carry the answer, and the places at which they read it."""
    starts = {str(carrier.site): Start(sign=1 if carrier.sign > 0 else -1) for carrier in carriers}
    places = {str(carrier.site): carrier.back for carrier in carriers}
    return Plan(sites=tuple(carrier.site for carrier in carriers), starts=starts, places=places)


@dataclass(frozen=True)
class OracleOutcome:
    """Of every question: the loss in nats, and whether the answer was right."""

    loss: np.ndarray
    correct: np.ndarray


@dataclass(frozen=True)
class Batch:
    """Questions as rows for the model. owners: (rows,) the question of a row. spans: of every question, the token positions of
    all its spans. span_end: (rows,) the position behind the span that holds the answer."""

    chosen: list[int]
    encoded: Encoded
    ids: Tensor
    last: Tensor
    owners: Tensor
    spans: list[list[list[int]]]
    span_end: Tensor

    def read_at(self, back: int) -> Tensor:
        """(rows,): the positions so many tokens before the one behind the span that holds the answer; none after the prompt."""
        return (self.span_end - back).clamp_min(0).minimum(self.last)


class Oracles:
    """Asks questions of a probe that says where its answers are. gated: the model fully gated (walk.fully_gated). ledger:
    where outcomes are kept; it has to know the weights.

    Raises UserError for questions that do not say it."""

    def __init__(
        self, gated: Subject, questions: Sequence[Asked], batch_size: int = 64, *, ledger: Ledger | None = None
    ):  # fmt: skip
        told = [each for each in questions if isinstance(each, Question) and each.spans and each.evidence is not None]
        if len(told) < len(questions):
            raise UserError("oracles need a probe with the positions of answers: kv, mqar or phonebook")
        self.gated, self.questions = gated, told
        self.ledger = (ledger or Ledger()).extended("oracles", hashlib.sha256(repr(list(questions)).encode()).hexdigest())
        self.mixers = [mixer.module for mixer in gated.anatomy.ssms]
        self.layers = [mixer.layer for mixer in gated.anatomy.ssms]
        self.batches = [self._batch(*part) for part in batches(gated.tokenizer, questions, batch_size)]

    def _batch(self, chosen: list[int], encoded: Encoded) -> Batch:
        tokenizer, device = self.gated.tokenizer, self.gated.model.device
        ids, last = padded(encoded.rows, device)
        spans, ends = [], []
        for question in (self.questions[i] for i in chosen):
            _, places = token_spans(tokenizer, question.prompt, question.spans)
            spans.append(places)
            ends.append(places[question.evidence or 0][-1] + 1)
        owners = encoded.owners()
        return Batch(chosen, encoded, ids, last, owners, spans, torch.tensor(ends, device=device)[owners.to(device)])

    @torch.inference_mode()
    def outcome(self, carriers: Sequence[OracleHead] = ()) -> OracleOutcome:
        """What the model answers with a perfect choice at the heads of `carriers`."""
        loss, correct = np.zeros(len(self.questions)), np.zeros(len(self.questions), dtype=bool)
        for batch in self.batches:
            with intercept_ssm_output(self.mixers, self._carrying(batch, carriers), always=True):
                logits = self._logits(batch)
            with explained(self.gated.model, batch.encoded.rows):
                loss[batch.chosen] = batch.encoded.losses(logits).cpu().numpy()
                correct[batch.chosen] = batch.encoded.correct(logits).cpu().numpy()
        return OracleOutcome(loss, correct)

    def _logits(self, batch: Batch) -> Tensor:
        """(rows, vocabulary)"""
        keep, where = batch.last.unique(return_inverse=True)
        logits = self.gated.model(input_ids=batch.ids, use_cache=False, logits_to_keep=keep).logits
        return logits[torch.arange(len(batch.ids), device=logits.device), where]

    def _carrying(self, batch: Batch, carriers: Sequence[OracleHead]) -> Any:
        """For `listening`: the SSM's output, but for the carriers at the last token."""
        rows = torch.arange(len(batch.ids), device=batch.ids.device)

        def listen(number: int, mixer: Any, y: Tensor, args: tuple[Any, ...], _: dict[str, Any]) -> Tensor:
            here = [carrier for carrier in carriers if carrier.site.layer == self.layers[number]]
            if not here:
                return y
            y, x = y.clone(), args[0].values.view_as(y)
            passed = _skipped(mixer, x[rows, batch.last])
            for carrier in here:
                (head,) = carrier.site.heads
                value = carrier.sign * x[rows, batch.read_at(carrier.back), head] + passed[:, head]
                y[rows, batch.last, head] = value.to(y.dtype)
            return y

        return listen

    def slopes(self) -> dict[OracleHead, float]:
        """To first order, the loss in nats that a perfect choice at one head saves: for every head at all places and with both
        signs, from one forward and one backward."""
        sums = [torch.zeros(2, len(PLACES), mixer.heads) for mixer in self.gated.anatomy.ssms]
        for batch in self.batches:
            rows = torch.arange(len(batch.ids), device=batch.ids.device)

            def listen(
                number: int, mixer: Any, y: Tensor, args: Any, _: Any, batch: Batch = batch, rows: Tensor = rows
            ) -> Tensor:
                y, x = y if y.requires_grad else y.detach().requires_grad_(), args[0].values.detach().view_as(y)
                own = y.detach()[rows, batch.last] - _skipped(mixer, x[rows, batch.last])

                def read(gradient: Tensor) -> None:
                    slope = gradient[rows, batch.last]
                    values = [x[rows, batch.read_at(back)] for back in PLACES]
                    for i, sign in enumerate((1, -1)):
                        saved = torch.stack([-(slope * (sign * value - own)).float().sum((0, 2)) for value in values])
                        sums[number][i] += saved.cpu()
                    handle.remove()  # a hook on y that holds y is a cycle that nobody collects

                handle = y.register_hook(read)
                return y

            with frozen(self.gated.model), intercept_ssm_output(self.mixers, listen), torch.enable_grad():
                batch.encoded.losses(self._logits(batch)).sum().backward()
        return {
            OracleHead(Site(mixer.layer, (head,)), back, sign): sums[number][i, place, head].item() / len(self.questions)
            for number, mixer in enumerate(self.gated.anatomy.ssms)
            for i, sign in enumerate((1, -1)) for place, back in enumerate(PLACES) for head in range(mixer.heads)
        }  # fmt: skip

    def carriers(self, most: int = 4, *, candidates: int = 8, worth: float = 0.02) -> list[tuple[OracleHead, OracleOutcome]]:
        """Heads with which a perfect choice saves most loss, one added to the others after the other, at most `most`, each with
        what the model answers then. It ends where no further head saves `worth` nats. The `candidates` heads that lead to first
        order are tried at those places, and with those signs, that lead to first order."""
        slopes = self.slopes()
        ways: dict[Site, list[OracleHead]] = {}
        for carrier in sorted(slopes, key=slopes.__getitem__, reverse=True):
            ways.setdefault(carrier.site, []).append(carrier)
        tried = [carrier for site in list(ways)[:candidates] for carrier in ways[site][:TRIED]]
        alone = dict(zip(tried, self.outcomes([[carrier] for carrier in tried], "perfect choice"), strict=True))
        best: dict[Site, OracleHead] = {}
        for carrier in sorted(alone, key=lambda carrier: alone[carrier].loss.mean()):
            best.setdefault(carrier.site, carrier)
        left, chosen = list(best.values()), list[tuple[OracleHead, OracleOutcome]]()
        (before,) = self.outcomes([[]], "as it is")
        while left and len(chosen) < most:
            here = [carrier for carrier, _ in chosen]
            outcomes = self.outcomes([[*here, carrier] for carrier in left], f"perfect choice, head {len(chosen) + 1}")
            number = min(range(len(left)), key=lambda i: outcomes[i].loss.mean())
            if before.loss.mean() - outcomes[number].loss.mean() < worth:
                break
            before = outcomes[number]
            chosen.append((left.pop(number), before))
        return chosen

    def outcomes(self, trials: Sequence[Sequence[OracleHead]], description: str) -> list[OracleOutcome]:
        """As `outcome`, of several sets of carriers. Several processes share them."""

        def key(number: int) -> Any:
            return [[str(carrier.site), carrier.back, carrier.sign] for carrier in trials[number]]

        def tensors(number: int) -> Tensors:
            found = self.outcome(trials[number])
            advance()
            return {"loss": torch.as_tensor(found.loss), "correct": torch.as_tensor(found.correct)}

        with counting(len(processes.share(range(len(trials)))), description) as advance:
            gathered = self.ledger.gather(range(len(trials)), key, tensors)
        return [OracleOutcome(each["loss"].numpy(), each["correct"].numpy()) for each in gathered.values()]


def _skipped(mixer: Any, x: Tensor) -> Tensor:
    """What a mixer's D passes on of x (rows, heads, p); 0 where it has none."""
    skip = getattr(mixer, "D", None)
    return torch.zeros_like(x) if skip is None else skip.to(x.dtype)[:, None] * x
