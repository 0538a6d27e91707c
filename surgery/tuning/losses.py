"""The losses of tuning, each of one part of a batch.

- examples: cross-entropy at the answers of training examples.
- text: KL(base || hybrid) of every token; with bigrams, also the cross-entropy at repeated rare bigrams.
- skills: KL(base || hybrid) at the answers to questions about what the base can do besides.
- hints: minus the log of the attention that the grafts pay to what each answer, or repeated bigram, is read from.

The teacher is the hybrid itself with its grafts (and adapters) switched off, so it computes what the base computes and needs no
memory; a control, which has no grafts to switch off, brings its base along.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.errors import UserError
from surgery.modeling.graft import NATS, GraftMixer
from surgery.modeling.reference import at_least_float32
from surgery.runtime.progress import say

IGNORE = -100
CHUNK = 2**24  # logits whose divergence is computed at once; on a GPU, which small pieces would starve, eight times as many


@dataclass
class Part:
    """Rows of one kind, of which a batch has up to three.

    kind: "examples", "text" or "skills". ids (b, t), padded on the right. targets (b, t): what each position has to predict, or
    IGNORE: of examples and skills the answers, of text the next token at repeated rare bigrams. positions (b, t): of packed
    rows. evidence (b, t, 2): for hints, the first token and the one behind the last of what a target is read from; both
    equal where that is not known. asked and others: the places, among the b * t, with a target and without.

    A batch is made on the host, and so is all that depends on its numbers: nothing waits for a GPU.
    """

    kind: str
    ids: Tensor
    targets: Tensor
    positions: Tensor | None = None
    evidence: Tensor | None = None
    asked: Tensor = field(default=None)  # type: ignore[assignment]
    others: Tensor = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.asked is None:
            is_asked = (self.targets != IGNORE).flatten()
            self.asked, self.others = is_asked.nonzero()[:, 0], (~is_asked).nonzero()[:, 0]

    def __len__(self) -> int:
        return len(self.ids)

    def counts(self) -> tuple[int, int]:
        """How many targets, and how many tokens, the losses are means over."""
        return len(self.asked), self.ids.numel()

    def rows(self, chosen: Tensor) -> "Part":
        """Some of its rows."""
        positions, evidence = (None if each is None else each[chosen] for each in (self.positions, self.evidence))
        return Part(self.kind, self.ids[chosen], self.targets[chosen], positions, evidence)

    def to(self, device: torch.device) -> "Part":
        """The same on a device, but for positions and evidence, which the host reads."""
        ids, targets, asked, others = (
            m.to(device, non_blocking=True) for m in (self.ids, self.targets, self.asked, self.others)
        )
        return Part(self.kind, ids, targets, self.positions, self.evidence, asked, others)


@dataclass(frozen=True)
class Weights:
    """The weights of the losses; that of examples is 1."""

    kl: float = 1.0
    skills: float = 0.0
    bigrams: float = 0.0
    hints: float = 0.0


class Losses(nn.Module):
    """A model and its teacher as one module, so that accelerate can wrap what computes a loss (autocast, DDP).

    teacher: the base of a control; None for a hybrid, which is its own teacher.
    """

    def __init__(self, model: Any, teacher: Any, weights: Weights, dtype: torch.dtype | None = None):
        """dtype: that autocast computes in, if any."""
        super().__init__()
        self.model, self.teacher, self.weights, self.dtype = model, teacher, weights, dtype
        self.part: Part | None = None
        self.missed: list[Tensor] = []
        grafts = [m.graft for m in model.modules() if isinstance(m, GraftMixer) and m.graft is not None]
        if weights.hints and teacher is None and not grafts:
            say("tune.hints: whole layers of attention take none")
        self.handles = [graft.register_forward_pre_hook(self._watch) for graft in grafts if weights.hints]

    def forward(self, part: Part, counts: tuple[float, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """(the loss to minimise, its terms in nats, without their weights). counts: the numbers of targets and of tokens in the
        whole batch, of which this part may be a share; among several processes, their means."""
        targets, tokens = (max(count, 1e-9) for count in counts)
        self.part, self.missed = part, []
        with torch.autocast(part.ids.device.type, self.dtype, enabled=self.dtype is not None):
            if part.kind == "examples":
                logits = self._logits(part, part.asked)
                terms = {"examples": self._entropy(logits, part) / targets}
            elif part.kind == "skills":
                divergence = kl_divergence(self._logits(part, part.asked), self._teacher_logits(part, part.asked))
                terms = {"skills": divergence / targets}
            else:
                logits = self._logits(part, None)
                terms = {}
                if self.weights.kl:
                    # What a bigram is taught need not be what the base says there.
                    at = part.others if len(part.asked) else None
                    student = logits if at is None else logits.index_select(0, at)
                    terms["kl"] = kl_divergence(student, self._teacher_logits(part, at)) / tokens
                if self.weights.bigrams:
                    terms["bigrams"] = self._entropy(logits.index_select(0, part.asked), part) / targets
            if self.missed:
                terms["hints"] = torch.stack(self.missed).mean() / targets
            weights = asdict(self.weights)
            loss = torch.stack([weights.get(name, 1.0) * term for name, term in terms.items()]).sum()
        return loss, {name: term.detach() for name, term in terms.items()}

    def _entropy(self, logits: Tensor, part: Part) -> Tensor:
        """The sum of the cross-entropies at the targets; of none it is 0, and has a gradient."""
        logits = at_least_float32(logits)
        return F.cross_entropy(logits, part.targets.flatten().index_select(0, part.asked), reduction="sum")

    def _logits(self, part: Part, at: Tensor | None, teacher: bool = False) -> Tensor:
        """(n, vocabulary) at the places `at` (n,) among the b * t, or at all: the head computes no others."""

        def pick(_: Any, args: tuple) -> tuple:
            hidden = args[0].flatten(0, 1)
            return (hidden if at is None else hidden.index_select(0, at))[None], *args[1:]

        model = self.teacher if teacher and self.teacher is not None else self.model
        packed = {} if part.positions is None else {"position_ids": part.positions}
        head = model.get_output_embeddings()
        handle = head.register_forward_pre_hook(pick)
        try:
            return model(input_ids=part.ids, use_cache=False, **packed).logits[0]
        finally:
            handle.remove()

    @torch.no_grad()
    def _teacher_logits(self, part: Part, at: Tensor | None) -> Tensor:
        with nullcontext() if self.teacher is not None else as_base(self.model):
            return self._logits(part, at, teacher=True)

    def _watch(self, graft: Any, args: tuple) -> None:
        """A hook before a graft's forward: note what the graft misses of the evidence. Where activations are computed again
        on the backward pass, it runs again."""
        if self.part is None or self.part.evidence is None:
            return
        owner, hidden, streams, _, _, _, packing = args
        if hidden.shape[:2] != self.part.ids.shape:
            raise UserError(
                "tune.hints: this base reads documents that share a row one by one, so text gives no hints; set "
                "tune.text_tokens to the length of a short document, or leave tune.hints out"
            )
        q, k = graft.queries_and_keys(owner(), hidden, streams, None, None, packing)
        documents = None if packing is None else packing.seq_idx
        bias = None
        if graft.time_step and streams.log_write is not None and len(graft.heads) == len(graft.signs):
            bias = streams.log_write[..., graft.heads].transpose(1, 2)  # b pairs t
        self.missed.append(missed_attention(q, k, bias, graft.null, self.part.evidence, documents).mean())

    def close(self) -> None:
        """Take the hooks from the grafts."""
        for handle in self.handles:
            handle.remove()


@contextmanager
def as_base(model: Any) -> Iterator[None]:
    """While this lasts, a hybrid computes what its base computes: without grafts and adapters."""
    off = [layer for layer in model.modules() if hasattr(layer, "lora_A") and not layer.disable_adapters]
    with model.disable_grafts():
        try:
            for layer in off:
                layer.enable_adapters(False)
            yield
        finally:
            for layer in off:
                layer.enable_adapters(True)


def kl_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """The sum over rows of KL(teacher || student), in nats, for logits (n, vocabulary); the student alone has a gradient."""
    return _KL.apply(student, teacher)


class _KL(torch.autograd.Function):
    """A few rows at a time: of what the formula needs, only the gradient, p_student - p_teacher, is kept."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        total = student.new_zeros((), dtype=torch.promote_types(student.dtype, torch.float32))
        gradient = torch.empty_like(student)
        rows = max(1, CHUNK * (8 if student.is_cuda else 1) // student.shape[-1])
        for first in range(0, len(student), rows):
            piece = slice(first, first + rows)
            p, q = (logits[piece].to(total.dtype).log_softmax(-1) for logits in (teacher, student))
            weight = p.exp()
            total += (weight * (p - q)).sum()
            gradient[piece] = (q.exp() - weight).to(student.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None


def missed_attention(
    q: Tensor, k: Tensor, bias: Tensor | None, null: Tensor | None, evidence: Tensor, documents: Tensor | None = None
) -> Tensor:
    """(pairs,): minus the log of the attention that each target's evidence gets, summed over the targets.

    q, k (b, pairs, t, width); bias (b, pairs, t); null (pairs,), the graft's parameter; evidence (b, t, 2) as in Part;
    documents (b, t): the number of each token's document, where a row holds several.
    """
    known = evidence[..., 1] > evidence[..., 0]
    most = int(known.sum(1).max())
    at = known.int().argsort(dim=1, descending=True, stable=True)[:, :most]  # of each row the targets, then others
    real = known.gather(1, at)
    first, stop = (side.gather(1, at)[:, None, :, None] for side in evidence.unbind(-1))
    at, real, first, stop = (m.to(q.device, non_blocking=True) for m in (at, real, first, stop))
    keys = torch.arange(k.shape[2], device=k.device)
    with torch.autocast(q.device.type, enabled=False):
        dtype = torch.promote_types(q.dtype, torch.float32)
        asking = q.gather(2, at[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])).to(dtype)
        scores = asking @ k.to(dtype).transpose(-1, -2)  # b pairs most t
        scores = scores if bias is None else scores + bias[:, :, None].to(dtype)
        scores = scores.masked_fill(keys > at[:, None, :, None], -torch.inf)
        if documents is not None:
            strange = documents.gather(1, at)[..., None] != documents[:, None]
            scores = scores.masked_fill(strange[:, None], -torch.inf)
        whole = scores.logsumexp(-1)
        if null is not None:
            whole = torch.logaddexp(whole, NATS * null[:, None].to(dtype))
        inside = (keys >= first) & (keys < stop) | ~real[:, None, :, None]
        found = scores.masked_fill(~inside, -torch.inf).logsumexp(-1)
        return (whole - found).masked_fill(~real[:, None], 0).sum((0, 2))
