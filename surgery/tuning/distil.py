"""The losses of tuning: cross-entropy on retrieval, KL to the teacher on text.

Student and teacher have most of their modules in common, and what coincides is run once for both. Below the first block that
is trained, or that the teacher has otherwise, both are the same function of the tokens: its states are computed without
autograd, and kept where the same batch will be seen again. Above it the teacher is the student with some blocks exchanged, so
that every block is one module in one place, whoever runs it (what shards a model by its modules relies on that).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.families import Hybrid
from surgery.hybrids.common import HybridCausalLM
from surgery.hybrids.parts import as_weight, at
from surgery.kernels.packing import packed
from surgery.tuning.chunked_kl import divergence
from surgery.tuning.sequences import IGNORE

Pair = tuple[Tensor, Tensor]
Text = tuple[Tensor, Tensor, Tensor]
Batch = tuple[Pair, Text | None]  # lessons: ids and targets; text: ids, which of them are real, and position_ids


class Distillation(nn.Module):
    """A student, and what its teacher has otherwise. `forward` gives the losses of a batch.

    Which of the student's parameters are trained is read off them when this is made. keep_bytes: how much of what comes from
    fixed weights may be kept in memory, for batches that have a key. bf16: compute in
    bfloat16, whatever the weights are in.
    """

    def __init__(
        self,
        student: Hybrid,
        teacher: PreTrainedModel,
        *,
        kl_weight: float = 1.0,
        keep_bytes: int = 0,
        bf16: bool = False,
    ):
        super().__init__()
        self.student, self.kl_weight, self.bf16, self.kept = student, kl_weight, bf16, Kept(keep_bytes)
        ours, theirs = list(student.base_model.layers), _blocks(teacher)
        own = len(ours) == len(theirs) and all(_coincide(a, b) for a, b in _around_blocks(student, teacher))
        # Another model altogether, or one whose embeddings or head are trained, is held as a whole.
        self.teacher = None if own else teacher
        pairs = zip(ours, theirs if own else ours, strict=True)
        self.others = [i for i, (a, b) in enumerate(pairs) if _trained(a) or (own and not _coincide(a, b))]
        self.other_blocks = nn.ModuleList([theirs[i] for i in self.others] if own else [])
        self.first = min(self.others, default=len(ours) - 1)  # below, both are the same, and nothing has a gradient

    def train(self, mode: bool = True) -> "Distillation":
        """The teacher is never trained."""
        super().train(mode)
        for part in (self.teacher, self.other_blocks):
            if part is not None:
                part.eval()
        return self

    def forward(
        self,
        ids: Tensor,
        targets: Tensor,
        text: Text | None = None,
        counts: tuple[float, float] | None = None,
        key: Any = None,
    ) -> dict[str, Tensor]:
        """{"loss", "retrieval", "kl"}: the sum that is trained, the cross-entropy per target, and KL(teacher || student) per
        token of text; in nats.

        ids, targets (b, t): targets[i] is what position i has to predict, or IGNORE. text: ids (b, t), which of them are real,
        and their positions, which begin again with every document that shares a row; without it the KL is 0. counts: what to
        divide the sums by, for a part of a batch: the targets and the real tokens of the whole. key: that of a batch, or of a
        part, which comes again.
        """
        with self.autocast(ids.device):
            asked = _numbers(targets != IGNORE)
            hidden = self._above(self._below(ids, (key, "lesson")), asked)
            targets_n, tokens_n = counts or (len(asked), 1 if text is None else text[1].sum())
            ce = F.cross_entropy(self._logits(hidden), at(asked, targets), reduction="sum") / targets_n
            kl = ce.new_zeros(())
            if text is not None and self.kl_weight:
                kl = self._divergence(*text, key) / tokens_n
            return {"loss": ce + self.kl_weight * kl, "retrieval": ce, "kl": kl}

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)

    @torch.no_grad()
    def block_states(self, ids: Tensor, places: Tensor | None = None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For every block that learns and that the teacher has otherwise, in order: (its number, what enters it in the teacher,
        what leaves it). places: position_ids of what is packed. Nothing above the last one is run. Raises UserError if the
        teacher has other embeddings or another head."""
        if self.teacher is not None:
            raise UserError("align needs the base as teacher")
        with self.autocast(ids.device):
            hidden = self._below(ids, (None, ""), places)
            learning = [i for i in self.others if _trained(self.student.base_model.layers[i])]
            for i in range(self.first, max(learning) + 1):
                entering, block = hidden, self._teachers_blocks()[i]
                hidden = self.run([block], norm=False, inputs_embeds=entering, position_ids=places)
                if i in learning:
                    yield i, entering, hidden

    @contextmanager
    def as_teacher(self) -> Iterator[PreTrainedModel]:
        """The teacher as a model: the student with the teacher's blocks, unless it is held as a whole."""
        if self.teacher is not None:
            yield self.teacher
            return
        with _arranged(self.student.base_model, self._teachers_blocks(), norm=True):
            yield self.student

    def run(self, blocks: Sequence[nn.Module], *, norm: bool, **inputs: Tensor | None) -> Tensor:
        """The hidden states behind some blocks, and behind the model's last norm."""
        with _arranged(self.student.base_model, blocks, norm):
            return self.student.base_model(**inputs, use_cache=False).last_hidden_state

    def _below(self, ids: Tensor, key: tuple[Any, str], places: Tensor | None = None) -> Tensor:
        """The states that student and teacher have in common, without autograd."""
        blocks = list(self.student.base_model.layers)[: self.first]

        def states() -> Tensor:
            return self.run(blocks, norm=False, input_ids=ids, position_ids=places)

        with torch.no_grad():
            return self.kept.get(key if self.first else (None, ""), states)

    def _above(self, hidden: Tensor, positions: Tensor, places: Tensor | None = None) -> Tensor:
        """The student's last states at some of all positions, (positions, d)."""
        return self._last(list(self.student.base_model.layers)[self.first :], hidden, positions, places)

    def _last(self, blocks: Sequence[nn.Module], hidden: Tensor, positions: Tensor, places: Tensor | None) -> Tensor:
        # Nothing is gained where it is all of them.
        keep = positions if len(positions) < hidden.shape[:2].numel() else None
        found = self.run(blocks, norm=True, inputs_embeds=hidden, position_ids=places, positions_to_keep=keep)
        return found.flatten(0, 1) if keep is None else found

    def _divergence(self, ids: Tensor, real: Tensor, places: Tensor, key: Any) -> Tensor:
        """The sum over the real tokens of KL(teacher || student)."""
        below, positions = self._below(ids, (key, "text"), places), _numbers(real)
        wanted = self._wanted(ids, below, positions, places, (key, "teacher"))
        hidden = self._above(below, positions, places)
        if not _trained(self.student.lm_head):
            return divergence(self._logits, hidden, self.student.config.vocab_size, wanted)
        given = self._logits(hidden).log_softmax(-1)
        return F.kl_div(given, wanted(slice(None)).log_softmax(-1), log_target=True, reduction="sum")

    @torch.no_grad()
    def _wanted(
        self, ids: Tensor, below: Tensor, positions: Tensor, places: Tensor, key: tuple[Any, str]
    ) -> Callable[[slice], Tensor]:
        """From some of the positions to the teacher's logits."""
        if self.teacher is not None:
            logits = at(positions, self._teachers_logits(ids, places)).float()
            return lambda part: logits[part]
        above = self._teachers_blocks()[self.first :]
        hidden = self.kept.get(key, lambda: self._last(above, below, positions, places))
        return torch.no_grad()(lambda part: self._logits(hidden[part]))

    def _teachers_logits(self, ids: Tensor, places: Tensor) -> Tensor:
        """Of a teacher that is held as a whole, (b, t, vocabulary). Another class than ours may let documents that share a row
        see each other: it gets them as rows of their own, in one call, whatever their number: processes that hold a part of it
        each have to call it alike."""
        assert self.teacher is not None

        def logits(ids: Tensor, **more: Tensor) -> Tensor:
            return self.teacher(input_ids=ids, use_cache=False, **more).logits  # type: ignore[misc]

        if isinstance(self.teacher, HybridCausalLM):
            return logits(ids, position_ids=places)
        documents = packed((places == 0).cumsum(-1), alike=False)
        return documents.apply(logits, ids)

    def _teachers_blocks(self) -> list[nn.Module]:
        exchanged = dict(zip(self.others, self.other_blocks, strict=True))
        return [exchanged.get(i, block) for i, block in enumerate(self.student.base_model.layers)]

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self.student.lm_head
        return head(as_weight(hidden, head.weight)).float()


class Kept:
    """Tensors by key, as long as all of them together take no more than so many bytes; the others are made anew."""

    def __init__(self, most: int):
        self.most, self.bytes, self.held = most, 0, dict[Any, Tensor]()

    def get(self, key: tuple[Any, str], make: Callable[[], Tensor]) -> Tensor:
        """key: (of the batch, or None if it does not come again; of what)."""
        if key in self.held:
            return self.held[key]
        made = make()
        if key[0] is not None and self.bytes + made.nbytes <= self.most:
            self.held[key] = made
            self.bytes += made.nbytes
        return made


def _numbers(mask: Tensor) -> Tensor:
    """Of a mask (b, t): which of the b * t positions are set."""
    return mask.flatten().nonzero()[:, 0]


def _blocks(model: Any) -> list[nn.Module]:
    return list(getattr(model.base_model, "layers", ()))


def _around_blocks(student: Any, teacher: Any) -> list[tuple[nn.Module, nn.Module]]:
    """Embeddings, last norm and head, of both."""
    ours, theirs = (
        (
            m.get_input_embeddings(),
            getattr(m.base_model, getattr(m.base_model, "last_norm", ""), None),
            m.get_output_embeddings(),
        )
        for m in (student, teacher)
    )
    return list(zip(ours, theirs, strict=True))


def _trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _coincide(one: nn.Module, other: nn.Module | None) -> bool:
    """Whether two modules are, and remain, the same function."""
    if type(one) is not type(other) or other is None or _trained(one):
        return False
    mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    return mine.keys() == theirs.keys() and all(p is theirs[name] or torch.equal(p, theirs[name]) for name, p in mine.items())


@contextmanager
def _arranged(decoder: Any, blocks: Sequence[nn.Module], norm: bool) -> Iterator[None]:
    """A backbone with other blocks, and, unless `norm`, without its last norm."""
    layers, last = decoder.layers, getattr(decoder, decoder.last_norm)
    try:
        decoder.layers = nn.ModuleList(blocks)
        if not norm:
            setattr(decoder, decoder.last_norm, nn.Identity())
        yield
    finally:
        decoder.layers = layers
        setattr(decoder, decoder.last_norm, last)
