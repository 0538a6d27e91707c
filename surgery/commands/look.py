"""look(model): a quick look, of about a minute, before any work. What a model is, what of it can be edited, whether it
retrieves, what its cache takes, and one line that says whether editing is worth trying.

Retrieval is measured first with the smallest dictionaries. A base that is at chance there shows nothing by which heads could be
located, and larger ones are not asked. Bytes of cache are counted from two short prompts, since they grow along a line.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.families import family_of
from surgery.loading.opened import Checkpoint, model_of, tokenizer_of
from surgery.locating.questions import asked
from surgery.locating.subject import is_graftable
from surgery.models.anatomy import anatomy
from surgery.models.cache import cache_after, decodes
from surgery.models.finite import within
from surgery.probes.encoded import Asked
from surgery.probes.perplexity import TextWindows, text_losses
from surgery.probes.scoring import answer
from surgery.probes.skills import AUTO, FACTS, skill_questions
from surgery.records.names import display_name
from surgery.records.plan import Plan
from surgery.records.recipe import Data
from surgery.records.record import Environment, Marked, Record, environment
from surgery.records.site import Site
from surgery.runtime.memory import size
from surgery.runtime.progress import busy
from surgery.splicing.remembered import opened, remembered_tokenizer
from surgery.splicing.splice import adopt, install
from surgery.splicing.windows import attention_groups
from surgery.statistics import CEILING, Estimate, Proportion, at_chance, mean, proportion
from surgery.world.tokenizer import is_of_the_world

PAIRS = (4, 8, 16, 32, 64)  # entries of a dictionary
MOST, LEAST = 128, 12  # questions of each kind
DECIDING = 32  # at least so many of the smallest dictionaries, by which a model is declined
SECONDS = 8.0  # for the questions of a kind, and for the text, beyond the least
SEED = 70_001  # added to the seed: no other questions have it
WINDOWS, WINDOW = 16, 256  # of text
CONTEXTS = (4_096, 32_768, 131_072)
SURE = 0.5  # an accuracy with 4 entries that no guessing reaches


class Measured(Record):
    """An accuracy, and what guessing gives."""

    accuracy: Proportion
    chance: float

    @property
    def at_chance(self) -> bool:
        return at_chance(self.accuracy, self.chance)

    def __str__(self) -> str:
        return f"{self.accuracy} (chance {self.chance:.3f})" + (", at chance" if self.at_chance else "")


class TextLoss(Record):
    """The loss on a text in nats per token. uniform: of guessing among all tokens, log(vocabulary)."""

    source: str
    loss: Estimate
    uniform: float

    @property
    def hopeless(self) -> bool:
        """Whether the model is no better there than guessing among all tokens."""
        return self.loss.value >= self.uniform

    def __str__(self) -> str:
        said = f"loss {self.loss.value:.3f} nats per token, of log(vocabulary) = {self.uniform:.3f}"
        return f"{said}: no better than guessing among all tokens" if self.hopeless else said


class Held(Record):
    """Bytes of cache and state after a context. a_head: what one grafted head adds; None where none can be."""

    context: int
    bytes: int
    a_head: int | None


class ModelLook(Environment, Marked):
    """What a quick look saw."""

    schema_version: int = 1
    model: str
    model_type: str
    parameters: int
    dtype: str
    layers: int
    mixers: str
    """The layers by the kind of their mixer."""
    vocabulary: int
    editable: tuple[int, ...]
    """The layers some of whose heads can be grafted."""
    heads: int
    """Heads of such a layer."""
    why_not: str
    """What keeps it from being edited; empty where nothing does."""
    retrieval: dict[str, Measured]
    """Entries of a dictionary -> accuracy."""
    skills: dict[str, Measured]
    facts: str
    """What skills are asked about: world, capitals, or a file."""
    on_text: TextLoss | None
    held: tuple[Held, ...]
    worth: bool
    verdict: str
    took: float
    """Seconds."""

    @property
    def pairs(self) -> int | None:
        """The size of dictionary to locate with: of those that the model answers in part, the one nearest to half of the
        questions. None where it answers none."""
        between = {int(n): each.accuracy.accuracy for n, each in self.retrieval.items() if not each.at_chance}
        return min(between, key=lambda n: abs(between[n] - 0.5), default=None)

    def lines(self) -> list[str]:
        """What is printed, the verdict last."""
        lines = [
            f"{self.model}: {self.model_type}, {self.parameters:,} parameters in {self.dtype}, {self.layers} layers "
            f"({self.mixers}), {self.vocabulary:,} tokens",
            f"can be edited: {_runs(self.editable)}, {self.heads:,} heads each" if not self.why_not else
            f"cannot be edited: {self.why_not}",
            *(f"dictionaries of {n} entries: {each}" for n, each in self.retrieval.items()),
            *(f"{name} ({self.facts}): {each}" for name, each in self.skills.items()),
        ]  # fmt: skip
        if self.on_text is not None:
            lines.append(f"text ({self.on_text.source}): {self.on_text}")
        held = []
        for each in self.held:
            more = "" if each.a_head is None else f" (a grafted head adds {size(each.a_head)})"
            held.append(f"{size(each.bytes)}{more} at {each.context:,} tokens")
        return [*lines, f"cache and state: {', '.join(held) or 'not to be counted'}", f"Verdict: {self.verdict}"]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__


def look(
    model: PreTrainedModel | Checkpoint, tokenizer: PreTrainedTokenizerBase | None = None, *, text: str | Path | None = None,
    facts: str | None = None, seed: int = 0,
) -> ModelLook:  # fmt: skip
    """A quick look at a model: what it is, what can be edited, whether it retrieves, what its cache takes, and a verdict.

    text: a file, on which its loss is measured. facts: what knowledge and letters are asked about, as data.facts of a recipe;
    by default capitals, or for a model with the tokenizer of the built-in world those of that world. The result prints as
    text. Raises UserError for a model whose numbers are not finite, and for a text that is not there or too short.
    """
    begun = time.monotonic()
    given = model_of(model, "look")
    words = tokenizer_of(model, remembered_tokenizer(given) if tokenizer is None else tokenizer, "look")
    adopted = adopt(given).eval()
    known = opened(given)
    name = model.name if isinstance(model, Checkpoint) else known.name if known else given.name_or_path
    name = display_name(name) if name else "the model"
    embeddings: Any = adopted.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    windows = None
    if text is not None:  # a text that cannot be read is refused before anything is measured
        windows = TextWindows(str(text), WINDOWS, WINDOW).token_windows(words, seed)
    facts = facts or ("world" if is_of_the_world(words) else "capitals")
    editable, heads, kinds, why_not = _what_can_be_edited(adopted)
    with within(name):
        with busy("counting cache and state"):
            held = _held(adopted, editable)
        with busy("asking for entries of dictionaries"):
            retrieval = _retrieval(adopted, words, seed)
        with busy("asking about its skills"):
            skills = _skills(adopted, words, facts, seed)
        with busy("measuring its loss on the text"):
            loss = None if windows is None else _loss(adopted, windows, str(text), vocabulary)
    worth, verdict = _verdict(why_not, retrieval, loss, _groups(adopted))
    return ModelLook(
        **environment().model_dump(), model=name, model_type=given.config.model_type,
        parameters=sum(p.numel() for p in adopted.parameters()), dtype=str(adopted.dtype).removeprefix("torch."),
        layers=getattr(adopted.config, "num_hidden_layers", len(editable)), mixers=kinds, vocabulary=vocabulary,
        editable=editable, heads=heads, why_not=why_not, retrieval=retrieval, skills=skills,
        facts=display_name(facts), on_text=loss, held=held, worth=worth, verdict=verdict,
        took=round(time.monotonic() - begun, 1),
    )  # fmt: skip


def _what_can_be_edited(model: PreTrainedModel) -> tuple[tuple[int, ...], int, str, str]:
    """(layers that take grafts, heads of one, the kinds of all layers, what keeps the model from being edited)."""
    try:
        kinds = anatomy(model).kinds()
        family = family_of(model.config)
        if not is_graftable(model):
            return (), 0, kinds, "it is a hybrid already"
        layers = tuple(family.graftable(model))
        return layers, family.shape(model.config)[1], kinds, "" if layers else "no layer of it takes grafts"
    except UserError as error:
        return (), 0, "unknown", str(error)


def _held(model: PreTrainedModel, editable: Sequence[int]) -> tuple[Held, ...]:
    grafted = None
    if not decodes(model):
        return ()
    own = [cache_after(model, context) for context in CONTEXTS]
    if editable:
        hybrid = install(model, Plan(kind="head", sites=(Site(editable[0], (0,)),))).eval()
        grafted = [cache_after(hybrid, context) for context in CONTEXTS]
    return tuple(
        Held(context=context, bytes=size, a_head=None if grafted is None else grafted[number] - size)
        for number, (context, size) in enumerate(zip(CONTEXTS, own, strict=True))
    )


def _retrieval(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> dict[str, Measured]:
    """By size, the smallest first, up to the first at which it is at chance."""
    measured: dict[str, Measured] = {}
    for pairs in PAIRS:
        _, questions = asked(tokenizer, "kv", {"pairs": pairs})
        right = _answers(model, tokenizer, questions(MOST, SEED + seed), LEAST if measured else DECIDING)
        measured[str(pairs)] = Measured(accuracy=proportion(right), chance=1 / pairs)
        if measured[str(pairs)].at_chance:
            break
    return measured


def _skills(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, facts: str, seed: int) -> dict[str, Measured]:
    """What it can do beside retrieval from dictionaries."""
    measured: dict[str, Measured] = {}
    for skill in AUTO:
        if skill.probe in FACTS:
            questions = skill_questions(skill, tokenizer, Data(facts=facts), MOST, SEED + seed)
            right = _answers(model, tokenizer, questions, LEAST)
            chance = float(np.mean([question.chance for question in questions[: len(right)]]))
            measured[skill.probe] = Measured(accuracy=proportion(right), chance=chance)
    return measured


def _answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Asked], least: int) -> np.ndarray:
    """Whether each answer was right, of as many questions as there is time for, and at least so many."""
    right: list[bool] = []
    begun = time.monotonic()
    size = 4
    while size > 0 and len(right) < len(questions):
        right.extend(answer(model, tokenizer, questions[len(right) : len(right) + size]).correct.tolist())
        each = (time.monotonic() - begun) / len(right)
        room = int(SECONDS / each) - len(right)
        size = max(least - len(right), min(room, 2 * len(right)))
    return np.array(right)


def _loss(model: PreTrainedModel, windows: Any, source: str, vocabulary: int) -> TextLoss:
    losses: list[float] = []
    begun = time.monotonic()
    for window in windows:
        losses.extend(text_losses(model, window[None], 1, 1).tolist())
        if len(losses) > 1 and time.monotonic() - begun > SECONDS:
            break
    return TextLoss(source=display_name(source), loss=mean(np.array(losses)), uniform=math.log(vocabulary))


def _groups(model: PreTrainedModel) -> int:
    """How many groups of attention heads can have a window."""
    try:
        return len(attention_groups(model))
    except UserError:  # an attention that can have none, or a model that is not known here
        return 0


def _verdict(why_not: str, retrieval: dict[str, Measured], text: TextLoss | None, groups: int) -> tuple[bool, str]:
    """Whether editing is worth trying, and a line that says so. groups: of attention heads that can have a window."""
    smallest, largest = next(iter(retrieval)), list(retrieval)[-1]
    beyond_chance = [n for n, each in retrieval.items() if not each.at_chance]
    on_text = ""
    if text is not None and text.hopeless:
        on_text = f" On {text.source}: {text}."
    if why_not:
        return False, f"not worth editing, because {why_not}."
    first = retrieval[smallest]
    # One interval in forty leaves chance by chance alone.
    if not beyond_chance or (len(beyond_chance) == 1 and first.accuracy.accuracy < SURE):
        return False, (
            f"not worth editing, because it does not retrieve: with dictionaries of {smallest} entries it answers {first}. "
            f"So no heads can be located by dictionaries. Names in running text may tell more (locate.probe=hits).{on_text}"
        )
    shrinks = f" Windows for some of its {groups} groups of attention heads may shrink the cache (plan.kind=window)."
    if (last := retrieval[largest]).accuracy.accuracy >= CEILING:
        return False, (
            f"not worth editing, because there is nothing to gain here: with {largest} entries it answers {last.accuracy}. "
            f"Ask for more (bench.suites=length).{shrinks if groups else ''}{on_text}"
        )
    return True, (
        f"worth trying: it retrieves ({first.accuracy.accuracy:.2f} with {smallest} entries), and less from larger "
        f"dictionaries ({last.accuracy.accuracy:.2f} with {largest}). `surgery run MODEL` edits it, with controls.{on_text}"
    )


def _runs(layers: Sequence[int]) -> str:
    """Layers in words."""
    if len(layers) > 1 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
