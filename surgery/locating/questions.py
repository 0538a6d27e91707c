"""What locate and prune ask: the questions of any choice probe."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.locating.exact import reference_batch
from surgery.locating.replay import How
from surgery.probes import make, without_unseen
from surgery.probes.question import CompletionProbe, Probe, Question
from surgery.probes.scoring import Encoded, batches
from surgery.records.recipe import Locate, ProbeChoice

REFERENCE_EXAMPLES = 32  # for mean and resample ablation

Groups = list[tuple[list[int], Encoded]]


def choice_probe(tokenizer: PreTrainedTokenizerBase, name: str, options: Mapping[str, Any] | None = None) -> Probe:
    """The probe of that name; options None: a recipe's default. Where options do not say otherwise, it asks for keys that
    lessons may hold. Raises UserError for one that asks for completions."""
    given = dict(ProbeChoice(probe=name).options if options is None else options)
    if "tokenizer" in given:
        raise UserError(f"the probe '{name}' takes the model's tokenizer, and no option of that name")
    made = make(name, tokenizer=tokenizer, **without_unseen(name, given))
    if isinstance(made, CompletionProbe):
        raise UserError(f"the probe '{name}' asks for completions; locating and pruning need one that asks questions")
    return made


@dataclasses.dataclass(frozen=True)
class Asked:
    """The questions of a probe for one seed, in batches. reference: others, for mean and resample ablation."""

    name: str
    options: dict[str, Any]
    seed: int
    questions: list[Question]
    groups: Groups
    reference: tuple[Tensor, Tensor] | None


def ask(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    examples: int,
    seed: int,
    batch_size: int,
    ablation: How = "zero",
    device: torch.device,
) -> Asked:
    """At most `examples` questions: some probes have no more. Raises UserError for fewer than two."""
    probe: Any = choice_probe(tokenizer, name, options)
    questions = probe.questions(examples, seed)
    if len(questions) < 2:
        raise UserError("locating needs at least 2 examples")
    reference = None
    if ablation != "zero":
        others = [other for other in probe.questions(REFERENCE_EXAMPLES, -1 - seed) if other not in questions]
        if not others:
            raise UserError(f"'{ablation}' ablation needs questions that are not asked, and {name} has no others; ask fewer")
        reference = reference_batch(tokenizer, others, device)
    made = {field.name: getattr(probe, field.name) for field in dataclasses.fields(probe) if field.repr}
    return Asked(name, made, seed, questions, list(batches(tokenizer, questions, batch_size)), reference)


def ask_all(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    seeds: int = 1,
    also: Sequence[Mapping[str, Any]] = (),
    seed: int,
    **how: Any,
) -> list[Asked]:
    """What a ranking and its repetitions ask: a probe's questions for each of `seeds` seeds, and those of other probes. how:
    the rest as in ask()."""
    wanted: list[tuple[str, Mapping[str, Any] | None, int]] = [(name, options, seed + i) for i in range(seeds)]
    wanted += [(other["probe"], other.get("options"), seed) for other in also]
    return [ask(tokenizer, one, its, seed=its_seed, **how) for one, its, its_seed in wanted]


def questions_digest(asked: Sequence[Asked]) -> str:
    """sha256 of all the questions, in order."""
    return hashlib.sha256(repr([each.questions for each in asked]).encode()).hexdigest()


def check_questions(tokenizer: PreTrainedTokenizerBase, options: Locate, seed: int) -> None:
    """Raise UserError if the probes of `options` have no questions for locate."""
    for one in (options, *options.also):
        ask(
            tokenizer, one.probe, one.options, examples=options.examples, seed=seed, batch_size=options.batch_size,
            ablation=options.ablation, device=torch.device("cpu"),
        )  # fmt: skip


def described(name: str, options: Mapping[str, Any]) -> str:
    """As a person would say it: kv (pairs 32)."""
    return f"{name} ({', '.join(f'{option} {value}' for option, value in options.items())})" if options else name
