"""A first look at a model: what it is, what can be edited, what it retrieves, what its cache takes, and a verdict: is editing
worth trying?

Retrieval is asked with the smallest dictionaries first. A base that is at chance there shows nothing by which heads could be
located, and larger ones are not asked.
"""

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.costs import cache_bytes, now, read_context
from surgery.evaluation.statistics import estimate
from surgery.evaluation.texts import open_held_out, token_losses
from surgery.locating.attribution import graft_mixers
from surgery.locating.locate import BLOCK
from surgery.locating.roles import find_roles
from surgery.modeling import family_of
from surgery.modeling.graft import ChannelGraft
from surgery.models.anatomy import anatomy
from surgery.models.digests import fingerprint, tokenizer_digest
from surgery.probes import make_probe
from surgery.probes.encoded import encode
from surgery.probes.question import Question
from surgery.probes.scoring import answer
from surgery.probes.toy_tokenizer import is_toy_tokenizer
from surgery.records.plan import Plan
from surgery.records.ranking import Estimate
from surgery.records.recipe import TOY, Data
from surgery.records.record import Record, installed_version
from surgery.records.site import Site
from surgery.runtime.files import file_digest, settings_digest
from surgery.runtime.processes import SMALL, threads_for
from surgery.runtime.progress import bar, size
from surgery.splicing.splice import adopt, measuring, splice

PAIRS = (4, 8, 16, 32, 64)  # entries of a dictionary
SKILLS = {"choice": "multiple choice", "knowledge": "facts"}
MOST = 128  # questions of a kind
LEAST, DECIDING = 32, 64  # questions for a large model on a processor; and with the smallest dictionaries, which decide
SEED = 70_001  # added to the seed: no other questions have it
WINDOWS, WINDOW = 16, 256  # of text
SHORT, LONG = 64, 128  # tokens of the prompts from whose caches longer ones are counted
CONTEXTS = (4_096, 32_768, 131_072)
STEP_PAIRS, STEP_RUNS, STEP_SECONDS = 8, 3, 60.0  # of the steps by layer: forward passes a layer, and the most they may take
SURE, CEILING = 0.5, 0.98  # accuracies: with 4 entries, what no guessing reaches; and what leaves nothing to gain


class Score(Record):
    """An accuracy, and what guessing gives."""

    accuracy: Estimate
    chance: float

    @property
    def at_chance(self) -> bool:
        """Whether guessing explains it."""
        return self.accuracy.low <= self.chance

    def __str__(self) -> str:
        a = self.accuracy
        return f"{a.mean:.2f} [{a.low:.2f}, {a.high:.2f}], chance {self.chance:.2f}" + (", at chance" if self.at_chance else "")


class Held(Record):
    """Bytes of cache and state after a context."""

    context: int
    bytes: int
    a_unit: int | None
    """What one grafted unit adds."""


class Look(Record):
    """What a first look saw."""

    schema_version: Literal[6] = 6
    toolkit: str
    fingerprint: str
    model: str
    model_type: str
    parameters: int
    dtype: str
    layers: int
    hidden_size: int
    vocabulary: int
    editable: tuple[int, ...]
    """The layers some of whose heads can be grafted."""
    units: int
    """Units of such a layer."""
    channels: int | None
    """Of a unit, where units are no heads but blocks of channels (Mamba-1)."""
    why_not: str
    """What keeps the model from being edited; empty where nothing does."""
    retrieval: dict[int, Score]
    """Entries of a dictionary -> accuracy."""
    steps: str
    """Which layers and convolutions gather and aggregate, as a sentence; empty where that was not measured."""
    skills: dict[str, Score]
    facts: str
    """What skills are asked about: toy or capitals."""
    text_loss: Estimate | None
    """Loss on the text, in nats per token."""
    text_uniform: float
    """That of guessing among all tokens."""
    held: tuple[Held, ...]
    tokens_per_second: float
    """Of a forward pass, for estimates, in processor time (evaluation.costs.now): a look is kept, and the machine may have been
    busy."""
    worth: bool
    verdict: str

    @property
    def pairs(self) -> int | None:
        """The size of dictionary to locate with: of those answered above chance, the one nearest to half of the questions."""
        between = {n: each.accuracy.mean for n, each in self.retrieval.items() if not each.at_chance}
        return min(between, key=lambda n: abs(between[n] - 0.5), default=None)

    @property
    def misreads_text(self) -> bool:
        """Whether the loss on the text is no better than guessing among all tokens."""
        return self.text_loss is not None and self.text_loss.mean >= self.text_uniform

    def __str__(self) -> str:
        unit, units = ("block", f"blocks of {self.channels} channels") if self.channels else ("head", "heads")
        can = f"{len(self.editable)} of {self.layers} layers, {self.units:,} {units} each"
        can = f"no: {self.why_not}" if self.why_not else can
        lines = [f"{self.model}: {self.model_type}, {self.parameters:,} parameters, {self.dtype}", f"can be edited: {can}"]
        lines += [f"dictionaries of {n} pairs: {score}" for n, score in self.retrieval.items()]
        lines += [f"steps, by layer: {self.steps}"] if self.steps else []
        lines += [
            f"{SKILLS[name]} ({'built-in toy data' if self.facts == TOY else self.facts}): {score}"
            for name, score in self.skills.items()
        ]
        if self.text_loss is not None:
            worse = "; guessing among all tokens is no worse" if self.misreads_text else ""
            lines.append(f"text: loss {self.text_loss.mean:.3f} nats per token (guessing {self.text_uniform:.3f}{worse})")
        held = [f"{size(h.bytes)}{f' (+{size(h.a_unit)} a {unit})' if h.a_unit else ''} at {h.context:,}" for h in self.held]
        lines += [f"cache: {', '.join(held)} tokens"] if held else []
        return "\n".join([*lines, f"Verdict: {self.verdict}"])


def look(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, text: str | Path | None = None, name: str = "", seed: int = 0
) -> Look:
    """Take a first look. It is kept in the user's cache folder by the model's fingerprint, and read there the next time.

    text: a file, on which the loss is measured. name: of the model, for the printed lines. Raises UserError for a model whose
    numbers are not finite, and for a text that is too short.
    """
    print_ = fingerprint(model)
    words = tokenizer_digest(tokenizer)
    read = None if text is None else file_digest(text)
    key = [print_, installed_version("mamba-surgery"), seed, read, words, model.device.type]
    kept = cache_folder("look") / f"{settings_digest(key)}.json"
    name = name or Path(str(model.name_or_path)).name
    if kept.is_file():
        with contextlib.suppress(UserError):  # of another version, or damaged
            return Look.read(kept).model_copy(update={"model": name})
    with measuring([model]), threads_for(sum(p.numel() for p in model.parameters())):
        seen = _measure(model, tokenizer, text, name, print_, seed)
    with contextlib.suppress(UserError):  # no place to keep it
        seen.write(kept)
    return seen


def cache_folder(kind: str) -> Path:
    """Where this user's looks are kept, and the parts of texts that recipes name."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mamba-surgery" / kind


def _measure(model: Any, tokenizer: Any, text: str | Path | None, name: str, print_: str, seed: int) -> Look:
    adopted = adopt(model).eval()
    rows = None
    if text is not None:
        held_out = open_held_out(tokenizer, Data(held_out_text=str(text)), WINDOWS * WINDOW, seed)
        rows, _ = held_out.rows(WINDOWS, WINDOW)
    editable, heads, why_not = _what_can_be_edited(adopted)
    blocks = editable and issubclass(adopted.mixer_at(editable[0]).graft_class, ChannelGraft)
    channels = BLOCK if blocks else None
    facts = TOY if is_toy_tokenizer(tokenizer) else "capitals"
    begun, asked = now(adopted.device), 0
    retrieval: dict[int, Score] = {}
    for pairs in bar(PAIRS, "looking"):
        questions = make_probe("kv", tokenizer, pairs=pairs).questions(MOST, SEED + seed)
        retrieval[pairs] = _ask(adopted, tokenizer, questions, LEAST if retrieval else DECIDING)
        asked += retrieval[pairs].accuracy.n * len(tokenizer(questions[0].prompt)["input_ids"])
        if retrieval[pairs].at_chance:
            break
    speed = asked / (now(adopted.device) - begun)
    skills = {}
    for skill in SKILLS:
        questions = make_probe(skill, tokenizer, source=facts).questions(MOST, SEED + seed)
        skills[skill] = _ask(adopted, tokenizer, questions, LEAST)
    loss = None if rows is None else estimate(token_losses(adopted, rows, 4).mean(1))
    vocabulary = int(adopted.get_input_embeddings().weight.shape[0])
    worth, verdict = _judge(why_not, retrieval, loss, math.log(vocabulary))
    return Look(
        toolkit=installed_version("mamba-surgery"),
        fingerprint=print_,
        model=name,
        model_type=family.model_type if (family := family_of(model.config)) else model.config.model_type,
        parameters=sum(p.numel() for p in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        layers=model.config.get_text_config().num_hidden_layers,
        hidden_size=model.config.get_text_config().hidden_size,
        vocabulary=vocabulary,
        editable=editable,
        units=heads if channels is None else -(-heads // channels),
        channels=channels,
        why_not=why_not,
        retrieval=retrieval,
        steps=_find_steps(adopted, tokenizer, seed, speed) if STEP_PAIRS in retrieval else "",
        skills=skills,
        facts=facts,
        text_loss=loss,
        text_uniform=math.log(vocabulary),
        held=_count_cache(adopted, editable, channels or 1),
        tokens_per_second=round(speed),
        worth=worth,
        verdict=verdict,
    )


def _what_can_be_edited(model: Any) -> tuple[tuple[int, ...], int, str]:
    """(layers that take grafts, heads of one, what keeps the model from being edited)."""
    if any(not entry.get("of_base") for entry in getattr(model.config, "grafts", None) or ()):
        return (), 0, "it is a hybrid of this toolkit already"
    if not hasattr(model, "mixer_at"):
        return (), 0, f"a {model.config.model_type} is of no family that can be grafted (`surgery list families`)"
    found = {layer: mixer.num_heads for layer, mixer in graft_mixers(model).items()}
    return tuple(found), max(found.values(), default=0), "" if found else "none of its layers takes grafts"


def _ask(model: Any, tokenizer: Any, questions: Sequence[Question], least: int) -> Score:
    """Ask the questions; of a large model on a processor only so many. By the clock a look would not be the same twice."""
    if model.device.type == "cpu" and sum(p.numel() for p in model.parameters()) > SMALL:
        questions = questions[:least]
    right = answer(model, tokenizer, questions).correct
    return Score(accuracy=estimate(right.astype(float)), chance=float(np.mean([question.chance for question in questions])))


def _find_steps(model: Any, tokenizer: Any, seed: int, speed: float) -> str:
    """The circuit by whole layers, which `locate` resolves into heads; nothing where it would take long."""
    encoded = encode(tokenizer, make_probe("kv", tokenizer, pairs=STEP_PAIRS).questions(LEAST, SEED + seed))
    try:
        layers = len(anatomy(model).blocks)
        if STEP_RUNS * layers * sum(map(len, encoded.rows)) > STEP_SECONDS * speed:
            return ""
        found = find_roles(model, encoded, (), (), range(len(encoded)), LEAST)
    except UserError:  # of no layout that is known here
        return ""
    return found.circuit.sentence if found.circuit else ""


def _count_cache(model: Any, editable: Sequence[int], heads: int) -> tuple[Held, ...]:
    """Bytes at long contexts, from two short ones: a cache grows along a line. heads: of a unit."""

    def line(model: Any) -> dict[int, int]:
        short, long = (cache_bytes(read_context(model, tokens)) for tokens in (SHORT, LONG))
        return {context: short + (long - short) // (LONG - SHORT) * (context - SHORT) for context in CONTEXTS}

    try:
        own, more = line(model), dict[int, int]()
        if editable:
            hybrid = splice(model, Plan(sites=(Site(editable[0], tuple(range(heads))),)))
            more = {context: bytes_ - own[context] for context, bytes_ in line(hybrid).items()}
    except (ValueError, UserError):  # the model does not decode from a cache
        return ()
    return tuple(Held(context=context, bytes=bytes_, a_unit=more.get(context)) for context, bytes_ in own.items())


def _judge(why_not: str, retrieval: dict[int, Score], loss: Estimate | None, uniform: float) -> tuple[bool, str]:
    """Whether editing is worth trying, and a sentence that says so."""
    (fewest, first), (largest, last) = next(iter(retrieval.items())), list(retrieval.items())[-1]
    above = [n for n, score in retrieval.items() if not score.at_chance]
    if why_not:
        return False, f"cannot be edited: {why_not}."
    if loss is not None and loss.mean >= uniform:
        if not above:
            return (
                False,
                "not worth trying: it neither retrieves nor predicts this text better than guessing. Are these the weights, "
                "and is this the tokenizer, that belong together?",
            )
        return (
            False,
            "not worth trying with this text: the model predicts it worse than guessing; give text of the kind it knows.",
        )
    if not above or (above == [fewest] and first.accuracy.mean < SURE):
        return (
            False,
            f"not worth trying: it does not retrieve, so no heads can be located; with {fewest} pairs it answers {first}.",
        )
    if last.accuracy.mean >= CEILING:
        return False, f"not worth trying: nothing is left to gain; with {largest} pairs it answers {last}."
    return True, (
        f"worth trying: it answers {first.accuracy.mean:.2f} of the questions with {fewest} pairs and {last.accuracy.mean:.2f} "
        f"with {largest}."
    )
