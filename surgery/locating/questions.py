"""What locate and prune ask: the questions of any choice probe, and, to locate, the recall hits of text."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.models.tokens import encode_prompts
from surgery.probes import make, without_unseen
from surgery.probes.encoded import Asked, Encoded, padded
from surgery.probes.question import CompletionProbe, Passage, PassageProbe, Probe, Question, WritingProbe
from surgery.probes.scoring import batches
from surgery.records.recipe import Locate, ProbeChoice

REFERENCE_EXAMPLES = 32  # for mean and resample ablation

# Batches: (indices of the questions, these questions encoded).
Groups = Sequence[tuple[list[int], Encoded]]


def choice_probe(tokenizer: PreTrainedTokenizerBase, name: str, options: Mapping[str, Any] | None = None) -> Probe:
    """The probe of that name; options None: a recipe's default. Unless the options say otherwise, it asks for the keys that
    lessons may hold. Raises UserError for a probe that asks for anything else."""
    probe = _made(tokenizer, name, options)
    if isinstance(probe, PassageProbe):
        raise UserError(f"locate.probe: '{name}' asks for tokens of text; here a probe with choices is needed, such as kv")
    return probe


def asked(
    tokenizer: PreTrainedTokenizerBase, name: str, options: Mapping[str, Any] | None = None
) -> tuple[Any, Callable[[int, int], Sequence[Asked]]]:
    """(the probe of that name, what it asks: at most n for a seed). As choice_probe, and also for tokens of text."""
    probe = _made(tokenizer, name, options)
    return probe, probe.passages if isinstance(probe, PassageProbe) else probe.questions


def _made(tokenizer: PreTrainedTokenizerBase, name: str, options: Mapping[str, Any] | None) -> Probe | PassageProbe:
    given = dict(ProbeChoice(probe=name).options if options is None else options)
    if "tokenizer" in given:
        raise UserError(f"the probe '{name}' takes the model's tokenizer, and no option of that name")
    probe = make(name, tokenizer=tokenizer, **without_unseen(name, given))
    if isinstance(probe, CompletionProbe | WritingProbe):
        raise UserError(f"the probe '{name}' asks for completions; locating and pruning need one that asks questions")
    return probe


@dataclasses.dataclass(frozen=True)
class QuestionSet:
    """What a probe asks for one seed, in batches. reference: the prompts of other questions, (ids (rows, t), last
    (rows,)), which mean and resample ablation need."""

    name: str
    options: dict[str, Any]
    seed: int
    questions: Sequence[Asked]
    groups: Groups
    reference: tuple[Tensor, Tensor] | None = None


def question_set(
    tokenizer: PreTrainedTokenizerBase, choice: ProbeChoice, options: Locate, *, seed: int, device: torch.device
) -> QuestionSet:
    """What one probe asks, at most `options.examples`: some probes have no more. Raises UserError for fewer than two."""
    probe, questions_of = asked(tokenizer, choice.probe, choice.options)
    questions = questions_of(options.examples, seed)
    if len(questions) < 2:
        raise UserError(f"locating needs at least 2 examples, and {choice.probe} has {len(questions)}")
    reference = None
    if options.ablation != "zero":
        others = [other for other in questions_of(REFERENCE_EXAMPLES, -1 - seed) if other not in questions]
        if not others:
            raise UserError(
                f"'{options.ablation}' ablation needs questions that are not asked, and {choice.probe} has no others; ask fewer"
            )
        reference = reference_batch(tokenizer, others, device)
    all_options = {field.name: getattr(probe, field.name) for field in dataclasses.fields(probe) if field.repr}
    groups = list(batches(tokenizer, questions, options.batch_size))
    return QuestionSet(choice.probe, all_options, seed, questions, groups, reference)


def question_sets(tokenizer: PreTrainedTokenizerBase, options: Locate, *, seed: int, device: torch.device) -> list[QuestionSet]:
    """The questions of a ranking and of its repetitions: of its probe for each of `options.seeds` seeds, then of the probes in
    `options.also`."""
    repeats: list[tuple[ProbeChoice, int]] = [(options, seed + i) for i in range(options.seeds)]
    repeats += [(other, seed) for other in options.also]
    return [question_set(tokenizer, choice, options, seed=its_seed, device=device) for choice, its_seed in repeats]


def questions_digest(sets: Sequence[QuestionSet]) -> str:
    """sha256 of all the questions, in order."""
    return hashlib.sha256(repr([one_set.questions for one_set in sets]).encode()).hexdigest()


def check_questions(tokenizer: PreTrainedTokenizerBase, options: Locate, seed: int) -> None:
    """Raise UserError if the probes of `options` have no questions for locate."""
    question_sets(tokenizer, options.model_copy(update={"seeds": 1}), seed=seed, device=torch.device("cpu"))


def reference_batch(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[Asked], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Passages, or the prompts of questions, (ids (rows, t), last (rows,)), as a reference for mean and resample ablation."""
    prompts = encode_prompts(tokenizer, [question.prompt for question in questions if isinstance(question, Question)])
    return padded([*prompts, *(list(each.ids) for each in questions if isinstance(each, Passage))], device)


def probe_in_words(name: str, options: Mapping[str, Any]) -> str:
    """As a person would say it: kv (pairs 32)."""
    return f"{name} ({', '.join(f'{option} {value}' for option, value in options.items())})" if options else name
