"""What a step of tuning sees: questions of probes with their answers, as rows of tokens with targets, and text.

What a step sees depends on the seed and its number alone. The seeds of its questions are beyond those of recipes, which
locating and bench use, and its keys and facts are not those that bench keeps for itself (probes.training_options).
"""

import dataclasses
import hashlib
import random
from collections.abc import Iterable, Sequence
from itertools import accumulate, permutations, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.models.tokens import divided, encode_continuations, encode_prompts, summary, token_spans
from surgery.probes import knowledge, make_probe, probe_class, training_options
from surgery.probes.bigrams import PairCounts, find_repeats
from surgery.probes.choice import LETTERS
from surgery.probes.kv import OPENING, ask_value, draw_dictionary, write_entry
from surgery.probes.question import Question, with_spans
from surgery.records.recipe import TOY, Data, Tune
from surgery.runtime.files import read_text
from surgery.tuning.losses import IGNORE, Part
from surgery.tuning.text import Source, check_apart, check_known, open_text, text_rows

QUERIES = 8  # questions after a dictionary
FIRST_SEED = 1 << 63
SKILL_ROWS = 8  # questions about other skills in a step
COUNTED = 2**17  # tokens of text in which bigrams are counted
MEASURED = 2**22  # characters of held-out text that are looked for in the training text


@dataclasses.dataclass(frozen=True)
class Example:
    """A text with answers in it: pieces (what precedes an answer, the answer, the characters of the first piece that hold
    it)."""

    pieces: tuple[tuple[str, str, tuple[int, int] | None], ...]


def dictionary_example(
    rng: random.Random, pairs: int, queries: int, keys: Any = "seen", between: int = 0, joint: bool = False, end: str = ""
) -> Example:
    """A dictionary, with at most `between` words between a key and its value, and at most `queries` questions about it. No key
    is asked for twice: the second answer could be copied from the first, which is not what the probe measures. end: a line
    break that belongs to the answers, or nothing."""
    entries = draw_dictionary(rng, pairs, keys, joint)
    lines = (write_entry(rng, *entry, rng.randint(0, between) if between else 0) for entry in entries.items())
    head, spans = with_spans(OPENING, lines)
    places = dict(zip(entries, spans, strict=True))
    asked = rng.sample(list(entries), min(queries, pairs))
    return Example(
        tuple(
            ((head if i == 0 else "\n".removeprefix(end)) + ask_value(key), entries[key] + end, places[key])
            for i, key in enumerate(asked)
        )
    )


def question_example(question: Question, end: str = "") -> Example:
    """A question with its right answer. end: what belongs to an answer that begins another choice."""
    evidence = None if question.evidence is None else question.spans[question.evidence]
    answer = question.choices[question.answer]
    begun = any(choice != answer and choice.startswith(answer) for choice in question.choices)
    return Example(((question.prompt, answer + end * begun, evidence),))


def encode_examples(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], kind: str = "examples") -> Part:
    """Rows whose targets are the answers. A piece is tokenised as the continuation of those before it, as the probes do it.
    Examples alone have evidence: in questions about other skills the grafts are to find nothing."""
    rows: list[list[int]] = []
    targets: list[list[int]] = []
    found: list[list[tuple[int, tuple[int, int]]]] = []  # of each row: a position with a target, and its evidence
    flat = [[text for before, answer, _ in each.pieces for text in divided(before, answer)] for each in examples]
    first = encode_prompts(tokenizer, [texts[0] for texts in flat])
    befores = [list(accumulate(texts)) for texts in flat]
    later = [
        (before, text) for texts, each in zip(flat, befores, strict=True) for before, text in zip(each, texts[1:], strict=False)
    ]
    others = iter(encode_continuations(tokenizer, later))
    for example, ids, texts in zip(examples, first, flat, strict=True):
        row, target, places = list(ids), [IGNORE] * (len(ids) - 1), []
        for number in range(1, len(texts)):
            tokens = next(others)
            is_answer = number % 2 == 1
            span = example.pieces[number // 2][2]
            if is_answer and span is not None:
                places += [(len(row) - 1 + i, span) for i in range(len(tokens))]
            row += tokens
            target += tokens if is_answer else [IGNORE] * len(tokens)
        rows.append(row)
        targets.append([*target, IGNORE])
        found.append(places)
    part = Part(kind, pad(rows, 0), pad(targets, IGNORE))
    if kind == "examples" and any(found):
        part.evidence = _evidence(tokenizer, [texts[0] for texts in flat], found, part.ids)
    return part


def _evidence(
    tokenizer: PreTrainedTokenizerBase,
    openings: Sequence[str],
    found: Sequence[Sequence[tuple[int, tuple[int, int]]]],
    ids: Tensor,
) -> Tensor:
    """(b, t, 2): where a model may hold what it has read in the span of each target (models/tokens.py: summary)."""
    evidence = torch.zeros(*ids.shape, 2, dtype=torch.long)
    for row, (opening, places) in enumerate(zip(openings, found, strict=True)):
        spans = sorted({span for _, span in places})
        of_span = {}
        if spans:
            _, tokens = token_spans(tokenizer, opening, spans)
            of_span = {span: summary(each, ids.shape[1]) for span, each in zip(spans, tokens, strict=True)}
        for position, span in places:
            if held := of_span[span]:
                evidence[row, position] = torch.tensor([held[0], held[-1] + 1])
    return evidence


def pad(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """Rows of different lengths as one tensor (rows, longest), filled up on the right."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=filler)


class ExampleSource:
    """The training examples of a run, by step."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Tune, seed: int):
        """Raises UserError for examples that cannot be made, at all combinations of the ends of their ranges."""
        self.tokenizer, self.options, self.seed = tokenizer, options, seed
        numbers = encode_continuations(tokenizer, [("bell:", str(number)) for number in range(100)])
        begun = any(a != b and b[: len(a)] == a for a, b in permutations(numbers, 2))
        self.end = "\n" if begun else ""  # a digit is a token, and the score of "3" is that of its line (probes/encoded.py)
        has_evidence = not options.hints or options.bigram_weight > 0
        for entry in options.examples:
            if entry.queries is not None and entry.probe != "kv":
                raise UserError(f"tune.examples: queries are for kv; the probe '{entry.probe}' asks one question")
            if entry.options.get("keys", "seen") != "seen" or entry.options.get("part", "tune") != "tune":
                raise UserError(f"tune.examples: '{entry.probe}' asks for what is kept for bench (options.keys, options.part)")
            ends = [value if isinstance(value, list | tuple) else (value,) for value in entry.options.values()]
            for values in product(*ends):
                ends_of = training_options(entry.probe, dict(zip(entry.options, values, strict=True)))
                probe = make_probe(entry.probe, tokenizer, **ends_of)
                has_evidence |= probe.questions(1, FIRST_SEED)[0].evidence is not None
        if not has_evidence:
            raise UserError("tune.hints: no probe of tune.examples says where its answers are; all but knowledge do")

    def step(self, step: int) -> Part:
        """The examples of one step: of one entry, with the same numbers drawn from its ranges."""
        rng = random.Random(f"examples {self.seed} {step}")
        entries = self.options.examples
        (entry,) = rng.choices(entries, [each.weight for each in entries])
        fractions = {field.name for field in dataclasses.fields(probe_class(entry.probe)) if isinstance(field.default, float)}
        drawn: dict[str, Any] = {
            name: (rng.uniform if name in fractions else rng.randint)(*value) if isinstance(value, list | tuple) else value
            for name, value in entry.options.items()
        }
        count = self.options.batch_size
        if entry.probe == "kv":
            queries = entry.queries or QUERIES
            options = {name: drawn[name] for name in ("between", "joint") if name in drawn}
            examples = [dictionary_example(rng, drawn["pairs"], queries, end=self.end, **options) for _ in range(count)]
        else:
            probe = make_probe(entry.probe, self.tokenizer, **training_options(entry.probe, drawn))
            examples = [question_example(question, self.end) for question in draw_questions(probe, count, rng)]
        return encode_examples(self.tokenizer, examples)


class SkillSource:
    """Questions about what the base can do besides, with their answers, by step."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skills: Iterable[tuple[str, dict[str, Any]]], seed: int):
        """skills: probes with their options."""
        self.tokenizer, self.seed = tokenizer, seed
        self.probes = [make_probe(name, tokenizer, **training_options(name, options)) for name, options in skills]

    def step(self, step: int) -> Part:
        """The skills take turns."""
        rng = random.Random(f"skills {self.seed} {step}")
        probe = self.probes[step % len(self.probes)]
        examples = [question_example(question) for question in draw_questions(probe, SKILL_ROWS, rng)]
        return encode_examples(self.tokenizer, examples, "skills")


def draw_questions(probe: Any, count: int, rng: random.Random) -> list[Question]:
    """`count` questions of a probe, from a seed beyond those of recipes; again from the first where a probe has fewer."""
    questions = probe.questions(count, FIRST_SEED + rng.getrandbits(63))
    return [questions[i % len(questions)] for i in range(count)]


class Batches:
    """What each step sees."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, seed: int):
        """Raises UserError for examples, text or skills that cannot be read, and for text that the model does not know."""
        self.tokenizer, self.options, self.data, self.seed = tokenizer, options, data, seed
        self.sources: list[Source] = []
        if options.text_batch_size:
            check_known(data.train_text, tokenizer)
            self.sources = open_text(data.train_text, data.column)
        if data.held_out_text != TOY and any(source.name != TOY for source in self.sources):
            held_out = "\n".join(open_text([data.held_out_text], data.column)[0].documents)
            check_apart(held_out, self.sources, MEASURED)
        self.examples = ExampleSource(tokenizer, options, seed)
        skills = data_skills(data) if options.skill_weight else []
        self.skills = SkillSource(tokenizer, skills, seed) if skills else None
        self.pairs: PairCounts | None = None
        if options.bigram_weight:  # counted in the part that is kept back, so that no row was counted
            rows, _ = text_rows(self.sources, tokenizer, 256, range(COUNTED // 256), 0, kept_back=True)
            self.pairs = PairCounts(list(rows.numpy()))

    def step(self, step: int) -> list[Part]:
        """Up to three parts: examples, text, skills."""
        parts = [self.examples.step(step)] if self.options.examples else []
        if self.skills is not None:
            parts.append(self.skills.step(step))
        if self.options.text_batch_size and (self.options.kl_weight or self.options.bigram_weight):
            parts.append(self.text(step))
        return parts

    def text(self, step: int) -> Part:
        """Rows of text, whose targets are the tokens that complete repeated rare bigrams, where these have a weight. What such
        a token is read from is the same token where the bigram stood before."""
        size = self.options.text_batch_size
        ids, positions = text_rows(
            self.sources, self.tokenizer, self.options.text_tokens, range(step * size, (step + 1) * size), self.seed
        )
        targets, evidence = torch.full_like(ids, IGNORE), None
        if self.pairs is not None:
            documents = None if positions is None else (positions == 0).cumsum(1).numpy()
            before = torch.from_numpy(find_repeats(ids.numpy(), self.pairs, self.data.rare, within=False, documents=documents))
            asked = before.roll(-1, 1)  # from the token before it
            asked[:, -1] = -1
            targets = torch.where(asked >= 0, ids.roll(-1, 1), IGNORE)
            if self.options.hints:
                evidence = torch.stack([asked, asked + 1], -1).masked_fill(asked[..., None] < 0, 0)
        return Part("text", ids, targets, positions, evidence)

    def inputs(self) -> dict[str, Any]:
        """What the batches depend on, by content: of files, not what they are called but what they hold."""
        given = [value for entry in self.options.examples for value in entry.options.values()]
        values = [each for value in given for each in (value if isinstance(value, list | tuple) else [value])]
        files = [value for value in values if isinstance(value, str) and Path(value).is_file()]
        read = {name: hashlib.sha256(read_text(name).encode()).hexdigest() for name in files}
        if self.skills is not None:
            facts = self.data.facts
            read[facts] = hashlib.sha256(read_text(facts).encode()).hexdigest() if Path(facts).is_file() else facts
        return {"text": [source.digest for source in self.sources], "read": read}


def data_skills(data: Data) -> list[tuple[str, dict[str, Any]]]:
    """The probes of data.skills with their options; auto: multiple choice only where facts have four choices. Raises UserError
    for a file of facts that cannot be read."""
    names = ("choice", "knowledge") if data.skills == "auto" else data.skills
    if data.skills == "auto" and data.facts not in (TOY, "capitals"):
        parts: tuple[knowledge.Part, ...] = ("bench", "tune")
        most = min(max(len(fact.choices) for fact in knowledge.read_facts(data.facts, part)) for part in parts)
        names = names if most >= len(LETTERS) else ("knowledge",)
    return [(name, {"source": data.facts}) for name in names]
