"""The losses of tuning: cross-entropy on retrieval, KL to the teacher on text and on the answers that show its other skills.

Student and teacher share most of their modules, and shared modules are run once for both. Below the first block that is
trained, or that differs between the two, both compute the same states from the tokens: these are computed without autograd, and
kept if the same batch comes again. Above it, the teacher is the student with some blocks exchanged. So every block is one
module in one place, whichever of the two runs it; libraries that divide a model by its modules rely on that.

A student whose own forward tells documents of one row apart (`packs`) reads packed text as it is; another one gets every
document as a row of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from surgery.families import Hybrid
from surgery.hybrids.packed import packing
from surgery.hybrids.parts import gather_positions
from surgery.hybrids.patching import replaced
from surgery.kernels.packing import Packing, packed
from surgery.models.pieces import rows_at_once
from surgery.probes.hits import NONE
from surgery.tuning.backward_memory import Checkpointing, KeepingWeights, Recomputing, casts_fixed_weights, recomputed
from surgery.tuning.chunked_kl import chunked_kl_divergence
from surgery.tuning.hinting import Seen, attention_nll, evidence_of_hits, has_grafts, watching
from surgery.tuning.partial_run import PartialRun, evaluated, swapped_blocks
from surgery.tuning.sequences import IGNORE
from surgery.tuning.shared_parts import StateCache, alike_around, blocks_of, is_trained, same_tensors_and_type

Lesson = tuple[Tensor, ...]  # ids and targets, and with hints what the targets are read from
# ids, which of them are no padding, position_ids, and perhaps where the pairs of recall hits occurred before
Text = tuple[Tensor, ...]
Skills = tuple[Tensor, Tensor]  # ids, which positions predict a token of an answer
Batch = tuple[Lesson, Text | None, Skills | None]


@dataclass(frozen=True)
class Below:
    """What a batch is in front of some block. ids, states: tokens, and what enters the block; None for what the model gives it.
    position_ids: of packed rows, for a model that reads such. documents: of packed rows whose documents are rows of
    their own here."""

    ids: Tensor
    states: Tensor | None
    position_ids: Tensor | None = None
    documents: Packing | None = None


@dataclass
class LastStates(MoeModelOutputWithPast):
    cache_params: None = None


class Distillation(nn.Module):
    """A student, and the modules in which its teacher differs from it. `forward` gives the losses of a batch.

    The parameters of the student that have a gradient now are those that will be trained. read_at: where hinted heads read
    (Plan.places). bf16: compute in bfloat16, whatever dtype the weights have. checkpointing: whether states within blocks are
    computed again in the backward pass (backward_memory.py).
    """

    def __init__(
        self,
        student: Hybrid,
        teacher: PreTrainedModel,
        *,
        kl_weight: float = 1.0,
        skill_weight: float = 0.0,
        hit_weight: float = 0.0,
        hint_weight: float = 0.0,
        read_at: Mapping[str, int] | None = None,
        bf16: bool = False,
        checkpointing: Checkpointing = False,
    ):
        super().__init__()
        self.recomputing = Recomputing(checkpointing)
        self.student, self.bf16, self.cache = student, bf16, StateCache()
        self.kl_weight, self.hit_weight, self.read_at = kl_weight, hit_weight, read_at or {}
        self.skill_weight = skill_weight
        self.hint_weight = hint_weight if has_grafts(student) else 0.0  # a control without grafts has nothing to hint at
        self._documents: tuple[Tensor, Packing | None] | None = None  # of the last position_ids
        self.part, self.packs = PartialRun(student), packs(student)
        ours, theirs = list(self.part.blocks), blocks_of(teacher)
        shared = len(ours) == len(theirs) and alike_around(student, teacher)
        # A teacher that is another model, or whose embeddings or head are trained in the student, is held as a whole.
        self.teacher = None if shared else teacher
        pairs = zip(ours, theirs if shared else ours, strict=True)
        self.different = [i for i, (a, b) in enumerate(pairs) if is_trained(a) or (shared and not same_tensors_and_type(a, b))]
        self.teacher_blocks = nn.ModuleList([theirs[i] for i in self.different] if shared else [])
        self.casts_fixed_weights = casts_fixed_weights(student)
        self.first = min(self.different, default=len(ours) - 1)  # below, student and teacher are the same and have no gradient

    def train(self, mode: bool = True) -> "Distillation":
        """The teacher is never trained."""
        super().train(mode)
        for part in (self.teacher, self.teacher_blocks):
            if part is not None:
                part.eval()
        return self

    def forward(
        self,
        ids: Tensor,
        targets: Tensor,
        text: Text | None = None,
        counts: tuple[float, ...] | None = None,
        key: Any = None,
        evidence: Tensor | None = None,
        skills: Skills | None = None,
    ) -> dict[str, Tensor]:
        """The losses in nats. "loss": the weighted sum that is minimised. "retrieval": the cross-entropy per target. "kl":
        KL(teacher || student) per token of text. "hits", where they have a weight: the cross-entropy per recall hit of the
        text; these tokens are left out of the KL. "hints", where they have a weight: minus the logarithm of the attention that
        the grafts pay to what an answer is read from, per target, and to what a hit is read from, per hit. "skills", where they
        have a weight: KL(teacher || student) per token of an answer to a question about another skill of the base.

        ids, targets (b, t): targets[i] is what position i has to predict, or IGNORE. text: ids (b, t), which of them are no
        padding, and their positions, which begin again with every document of a row, and where hits have a weight, what
        packed_rows.pad_packed_with_hits says of them; without text the KL is 0. skills: questions with their answers, as
        skills.skill_loader gives them. counts: the numbers of targets, of text tokens, of hits and of answers' tokens in the
        whole batch, where this is only a part of it: of several processes, their means. key: identifies a
        batch (or a part) that comes again. evidence: what the targets are read from, as sequences.collate_with_evidence gives
        it.
        """
        with self.autocast(ids.device):
            positions = _positions(targets != IGNORE)
            # Of none there is nothing to divide. Means over processes may be less than 1.
            all_counts = counts or counted(targets, text, skills)
            target_count, token_count, hits, answers = (count or 1 for count in all_counts)
            more: dict[str, Tensor] = {}
            if all_counts[0] or not self.hit_weight:
                below = self._below(ids, (key, "lesson"))
                with self._watching(evidence is not None) as seen:
                    hidden = self._last(list(self.part.blocks), below, positions)
                ce = self._cross_entropy(hidden, gather_positions(positions, targets)) / target_count
                if seen and evidence is not None:
                    more["hints"] = attention_nll(seen, evidence) / target_count
            else:  # nothing but text, of which a part of a batch may have none; every trained number still gets a gradient
                trained = [p.float().sum() for p in self.student.parameters() if p.requires_grad]
                ce = 0 * torch.stack(trained).sum()
            kl = ce.new_zeros(())
            if self.hit_weight:
                hints = more["hits"] = kl
                if text is not None:
                    divergence, entropy, missed_hits = self._text_losses(*text, key=key)
                    kl, more["hits"], hints = divergence / token_count, entropy / hits, missed_hits / hits
                if self.hint_weight:
                    more["hints"] = more.get("hints", 0) + hints
            elif text is not None and self.kl_weight:
                kl = self._text_losses(*text, key=key)[0] / token_count
            if self.skill_weight and all_counts[3]:
                more["skills"] = kl.new_zeros(()) if skills is None else self._skills_lost(*skills, key=key) / answers
            loss = ce + self.kl_weight * kl
            weights = {"hits": self.hit_weight, "hints": self.hint_weight, "skills": self.skill_weight}
            for name, weight in weights.items():
                loss = loss + weight * more[name] if name in more else loss
            return {"loss": loss, "retrieval": ce, "kl": kl, **more}

    def _cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The sum over targets (n,) of their negative log-probability after the states (n, d). Logits of a piece of them exist
        at a time, also in the backward pass, which computes them again."""

        def loss(hidden: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self._logits(hidden), targets, reduction="sum")

        size = rows_at_once(self.student)
        if len(targets) <= size:
            return loss(hidden, targets)
        parts = zip(hidden.split(size), targets.split(size), strict=True)
        return torch.stack([checkpoint(loss, *part, use_reentrant=False, context_fn=recomputed) for part in parts]).sum()

    def _watching(self, told: bool) -> AbstractContextManager[Seen]:
        """The student's grafts, where hints have a weight and it is told what is to be looked at."""
        return watching(self.student if self.hint_weight and told else None, self.read_at)

    @contextmanager
    def autocast(self, device: torch.device) -> Iterator[None]:
        keeping = KeepingWeights() if self.bf16 and self.casts_fixed_weights else nullcontext()
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16), keeping:
            yield

    @contextmanager
    def as_teacher(self) -> Iterator[PreTrainedModel]:
        """The teacher as a model: the student with the teacher's blocks in place, unless the teacher is held as a whole."""
        if self.teacher is not None:
            yield self.teacher
            return
        with swapped_blocks(self.part.blocks, self._all_teacher_blocks()):
            yield self.student

    def run(
        self, below: Below, blocks: Sequence[nn.Module], first: int, stop: int, *, positions: Tensor | None = None,
        norm: bool = False,
    ) -> Tensor:  # fmt: skip
        """The states behind blocks[first:stop], and behind the model's last norm if `norm` is True; see PartialRun."""
        position_ids, ids = below.position_ids, below.ids
        known = {} if position_ids is None else {"position_ids": position_ids, "packing": self._packing(position_ids)}

        def first_alone(hidden: Tensor) -> None:
            self.part(ids[:1], blocks, first, first + 1, states=hidden)

        with self.recomputing.deciding(blocks[first:stop], below.states, first_alone):
            return self.part(ids, blocks, first, stop, states=below.states, positions=positions, norm=norm, **known)

    def _packing(self, position_ids: Tensor) -> Packing | None:
        """Which tokens of a batch with these position_ids (b, t) are which documents. Who finds out waits for a GPU, so it is
        done once for student and teacher."""
        if self._documents is None or self._documents[0] is not position_ids:
            self._documents = position_ids, packing(position_ids, None, position_ids, None, None, {})
        return self._documents[1]

    def _below(self, ids: Tensor, key: tuple[Any, str], position_ids: Tensor | None = None) -> Below:
        """What is below the first different block, which student and teacher share, without autograd."""
        documents = None
        if position_ids is not None and not self.packs:
            documents, position_ids = _documents(position_ids), None
            ids = documents.groups[0].unpack(ids)
        tokens = Below(ids, None, position_ids, documents)

        def states() -> Tensor:
            return self.run(tokens, list(self.part.blocks), 0, self.first)

        with torch.no_grad(), evaluated(self.student):
            return replace(tokens, states=self.cache.get(key if self.first else (None, ""), states))

    def _last(self, blocks: Sequence[nn.Module], below: Below, positions: Tensor) -> Tensor:
        """The last states at some positions, (positions, d), of the student's blocks or the teacher's."""
        assert below.states is not None
        if below.documents is not None:
            positions = below.documents.places.flatten()[positions]
        # Selecting all positions would cost time and gain nothing.
        every = below.documents is None and len(positions) == below.states.shape[:2].numel()
        last = self.run(below, blocks, self.first, len(blocks), positions=None if every else positions, norm=True)
        return last.flatten(0, 1) if every else last

    def _text_losses(
        self, ids: Tensor, real: Tensor, position_ids: Tensor, before: Tensor | None = None, *, key: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(the sum of KL(teacher || student) over all tokens that are no padding and predict no hit, the sum of the negative
        log-probabilities of the hits, and with hints what the grafts miss of what hits are read from)."""
        below, positions = self._below(ids, (key, "text"), position_ids), _positions(real)
        others: Any = slice(None)
        if before is not None:
            evidence = evidence_of_hits(before)
            chosen = gather_positions(positions, evidence[..., 1] > 0)
            others = ~chosen
        teacher = (
            self._teacher_logits(ids, below, positions[others], position_ids, (key, "teacher")) if self.kl_weight else None
        )
        with self._watching(before is not None) as seen:
            hidden = self._last(list(self.part.blocks), below, positions)
        entropy = hints = hidden.new_zeros((), dtype=torch.float)
        if before is not None and chosen.any():
            entropy = self._cross_entropy(hidden[chosen], gather_positions(positions, ids.roll(-1, 1))[chosen])
        if seen:
            hints = self._missed_hits(seen, evidence, below)
        if teacher is None:
            return entropy.new_zeros(()), entropy, hints
        hidden = hidden[others]
        if not is_trained(self.student.lm_head):
            return chunked_kl_divergence(self._logits, hidden, self.student.config.vocab_size, teacher), entropy, hints
        student = self._logits(hidden).log_softmax(-1)
        return F.kl_div(student, teacher(slice(None)).log_softmax(-1), log_target=True, reduction="sum"), entropy, hints

    def _skills_lost(self, ids: Tensor, answers: Tensor, *, key: Any) -> Tensor:
        """The sum of KL(teacher || student) over all tokens of answers."""
        below, positions = self._below(ids, (key, "skills")), _positions(answers)
        teacher = self._teacher_logits(ids, below, positions, None, (key, "teacher of skills"))
        student = self._logits(self._last(list(self.part.blocks), below, positions)).log_softmax(-1)
        return F.kl_div(student, teacher(slice(None)).log_softmax(-1), log_target=True, reduction="sum")

    def _missed_hits(self, seen: Seen, evidence: Tensor, below: Below) -> Tensor:
        """What hinting.missed says of rows of documents."""
        if below.documents is not None:
            return attention_nll(seen, below.documents.groups[0].unpack(evidence))
        assert below.position_ids is not None
        return attention_nll(
            seen, evidence, torch.arange(below.position_ids.shape[1], device=below.position_ids.device) - below.position_ids
        )

    @torch.no_grad()
    def _teacher_logits(
        self, ids: Tensor, below: Below, positions: Tensor, position_ids: Tensor | None, key: tuple[Any, str]
    ) -> Callable[[slice], Tensor]:
        """A function from a slice of the positions to the teacher's logits there."""
        if self.teacher is not None:
            logits = gather_positions(positions, self._logits_of_whole_teacher(ids, position_ids)).float()
            return lambda part: logits[part]
        with evaluated(self.student):
            hidden = self.cache.get(key, lambda: self._last(self._all_teacher_blocks(), below, positions))
        return torch.no_grad()(lambda part: self._logits(hidden[part]))

    def _logits_of_whole_teacher(self, ids: Tensor, position_ids: Tensor | None) -> Tensor:
        """The logits of a teacher that is held as a whole, (b, t, vocabulary).

        A class that is not ours may let documents of one row see each other, so it gets every document as a row of its own. It
        gets all of them in one call, because processes that each hold a part of the teacher have to call it equally often."""
        assert self.teacher is not None

        def logits(ids: Tensor, **more: Tensor) -> Tensor:
            return self.teacher(input_ids=ids, use_cache=False, **more).logits  # type: ignore[misc]

        if position_ids is None:
            return logits(ids)
        return logits(ids, position_ids=position_ids) if packs(self.teacher) else _documents(position_ids).apply(logits, ids)

    def _all_teacher_blocks(self) -> list[nn.Module]:
        exchanged = dict(zip(self.different, self.teacher_blocks, strict=True))
        return [exchanged.get(i, block) for i, block in enumerate(self.part.blocks)]

    def _logits(self, hidden: Tensor) -> Tensor:
        """What the student's own forward makes of last states (n, d), (n, vocabulary)."""
        states = LastStates(last_hidden_state=hidden[None])
        with replaced({self.student.base_model: lambda *_, **__: states}):
            return self.student(inputs_embeds=hidden[None], use_cache=False).logits[0].float()


def counted(targets: Tensor, text: Text | None, skills: Skills | None = None) -> list[int]:
    """How many targets, tokens of text, hits and tokens of answers about skills a batch has."""
    tokens, answers = (0 if part is None else int(part[1].sum()) for part in (text, skills))
    hits = 0 if text is None or len(text) < 4 else int((text[3] != NONE).sum())
    return [int((targets != IGNORE).sum()), tokens, hits, answers]


def packs(model: Any) -> bool:
    """Whether a model's own forward tells documents of one row apart."""
    return getattr(model, "packs", False)


def _documents(position_ids: Tensor) -> Packing:
    """Every document of rows with these position_ids as a row of its own."""
    return packed((position_ids == 0).cumsum(-1), alike=False)


def _positions(mask: Tensor) -> Tensor:
    """The indices of the positions that are set in a mask (b, t), out of b * t."""
    return mask.flatten().nonzero()[:, 0]
