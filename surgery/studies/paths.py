"""Where an answer travels: what a head puts out at some tokens of the prompt is exchanged, and the answer says what it was for.

Two prompts differ in one thing: the text of the right answer has changed places with that of another answer, each in its own
span, so that another answer is right. While the model reads the first prompt, one head puts out at some of the tokens what it
puts out there in the second. As far as the right answer is lost by that, its way leads through this head at these tokens. The
tokens are told apart by their part in the prompt: a head that matters at the answer's span *contextualises* (gathers), one that
matters at the last token aggregates.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.locating.subject import Subject
from surgery.models.anatomy import MixerPlace
from surgery.models.finite import explained
from surgery.models.tokens import encode_prompts, token_spans
from surgery.probes.encoded import Encoded, encode, padded
from surgery.probes.question import Question
from surgery.records.site import Site
from surgery.runtime.progress import Track

# The parts of a prompt: the span that holds the answer up to the answer, the answer, what follows it (the token behind the span
# included), the same of the span with which it changes places, the question, and the last token.
PARTS = ("before the answer", "the answer", "behind the answer", "the other span", "the question", "the last token")


@dataclass(frozen=True)
class Travelled:
    """Losses of the right answer, in nats. clean, exchanged: (questions,), of the two prompts. patched: (parts, heads,
    questions), of the first prompt with a head's output at a part from the second. sites: the heads."""

    sites: tuple[Site, ...]
    clean: np.ndarray
    exchanged: np.ndarray
    patched: np.ndarray

    def share(self) -> np.ndarray:
        """(parts, heads): of what the exchange costs, the share that this head costs at this part, on average."""
        return (self.patched - self.clean).mean(-1) / (self.exchanged - self.clean).mean()


@torch.inference_mode()
def travel(subject: Subject, questions: Sequence[Question], *, batch_size: int = 64, seed: int = 0) -> Travelled:
    """Exchange what every head puts out at every part. Raises UserError for questions whose answers do not stand in spans."""
    sites = tuple(subject.anatomy.sites())
    clean, whole = np.zeros(len(questions)), np.zeros(len(questions))
    patched = np.zeros((len(PARTS), len(sites), len(questions)))
    rng = random.Random(f"exchanged answers {seed}")
    others = [exchanged(subject.tokenizer, question, rng) for question in questions]
    starts = range(0, len(questions), batch_size)
    for chosen in (slice(start, start + batch_size) for start in starts):
        pairs = list(zip(questions[chosen], others[chosen], strict=True))
        first, second = (encode(subject.tokenizer, [pair[i] for pair in pairs]) for i in (0, 1))
        parts = _parts(subject.tokenizer, pairs, first)
        columns: dict[nn.Module, Tensor] = {}
        with _recording(subject.anatomy.mixers, columns):
            whole[chosen] = _losses(subject, second)
        clean[chosen] = _losses(subject, first)
        jobs = [(part, number) for part in range(len(PARTS)) for number in range(len(sites))]
        for part, number in Track(jobs, "exchanging"):
            mixer = subject.anatomy.mixer_of(sites[number])
            with _putting_out(mixer, mixer.columns(sites[number].heads[0]), columns[mixer.out], parts[part]):
                patched[part, number, chosen] = _losses(subject, first)
    return Travelled(sites, clean, whole, patched)


def exchanged(tokenizer: PreTrainedTokenizerBase, question: Question, rng: random.Random) -> Question:
    """The question with the right answer's text and another's in each other's places. Raises UserError where that cannot be:
    the answer has to end its span, and another one of as many tokens another span."""
    if question.evidence is None or not question.spans:
        raise UserError("answer_paths needs a probe with the positions of answers: kv, mqar or phonebook")
    spans = [question.prompt[begin:stop] for begin, stop in question.spans]
    texts = [_ending(span, question.choices) for span in spans]
    right, own = question.choices[question.answer].strip(), question.evidence
    (ids,) = encode_prompts(tokenizer, [question.prompt])
    others = [(number, text) for number, text in enumerate(texts) if text and text != right and texts[own] == right]
    for other, wrong in rng.sample(others, len(others)):
        changed = list(spans)
        changed[own], changed[other] = _ended(spans[own], right, wrong), _ended(spans[other], wrong, right)
        prompt, places = _joined(question, changed)
        if len(encode_prompts(tokenizer, [prompt])[0]) == len(ids):
            return replace(question, prompt=prompt, spans=places)
    raise UserError("answer_paths needs an answer that ends its span, and another one of as many tokens that ends another span")


def _ending(span: str, choices: Sequence[str]) -> str | None:
    """The longest of the choices with which a span ends, white space aside."""
    ends = [choice.strip() for choice in choices if span.rstrip().endswith(choice.strip())]
    return max(ends, key=len, default=None)


def _ended(span: str, old: str, new: str) -> str:
    """A span that ends in another text."""
    before, _, after = span.rpartition(old)
    return before + new + after


def _joined(question: Question, texts: Sequence[str]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The prompt with other texts in its spans, and where they stand then."""
    prompt, end, places = "", 0, []
    for (begin, stop), text in zip(question.spans, texts, strict=True):
        prompt += question.prompt[end:begin]
        places.append((len(prompt), len(prompt) + len(text)))
        prompt += text
        end = stop
    return prompt + question.prompt[end:], tuple(places)


def _parts(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[Question, Question]], encoded: Encoded) -> Tensor:
    """(parts, rows, t) bool: which tokens belong to a part."""
    ids, last = padded(encoded.rows, torch.device("cpu"))
    parts = torch.zeros(len(PARTS), *ids.shape, dtype=torch.bool)
    for row, number in enumerate(encoded.owners().tolist()):
        question, other = pairs[number]
        tokens, spans = token_spans(tokenizer, question.prompt, question.spans)
        theirs, _ = token_spans(tokenizer, other.prompt, other.spans)
        differing = [i for i in range(len(tokens)) if tokens[i] != theirs[i]]
        own = spans[question.evidence or 0]
        answer = [i for i in differing if own[0] <= i <= own[-1]]
        elsewhere = [i for i in differing if i not in answer]
        beside = next((span for span in spans if elsewhere and span[0] <= elsewhere[0] <= span[-1]), [])
        after_spans = spans[-1][-1] + 2  # the token behind the last span may belong to its summary
        places = (
            [i for i in own if i < answer[0]], answer, [*(i for i in own if i > answer[-1]), own[-1] + 1],
            [*beside, *(i + 1 for i in beside[-1:])], range(after_spans, int(last[row])),
            range(int(last[row]), int(last[row]) + 1),
        )  # fmt: skip
        for part, at in enumerate(places):
            parts[part, row, list(at)] = True
    return parts


@contextmanager
def _recording(mixers: Sequence[MixerPlace], columns: dict[nn.Module, Tensor]) -> Iterator[None]:
    """While this lasts, what output projections read is kept."""

    def record(out: nn.Module, args: tuple[Tensor, ...]) -> None:
        columns[out] = args[0].clone()

    handles = [mixer.out.register_forward_pre_hook(record) for mixer in mixers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _putting_out(mixer: MixerPlace, head: slice, values: Tensor, where: Tensor) -> Iterator[None]:
    """While this lasts, the columns of one head are others at some tokens. where: (rows, t) bool."""

    def put(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        columns, at = args[0].clone(), where.to(args[0].device)
        columns[..., head] = torch.where(at[..., None], values[..., head], columns[..., head])
        return (columns, *args[1:])

    handle = mixer.out.register_forward_pre_hook(put)
    try:
        yield
    finally:
        handle.remove()


def _losses(subject: Subject, encoded: Encoded) -> np.ndarray:
    """(questions,) nats."""
    ids, last = padded(encoded.rows, subject.model.device)
    keep, where = last.unique(return_inverse=True)
    logits = subject.model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
    logits = logits[torch.arange(len(ids), device=ids.device), where]
    with explained(subject.model, encoded.rows):
        return encoded.losses(logits).cpu().numpy()
