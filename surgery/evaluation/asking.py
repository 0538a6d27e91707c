"""Probes as tasks of suites: which probe is asked, in which size, and of whom its answers are taken."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.cells import digest, watched
from surgery.evaluation.contexts import readable
from surgery.evaluation.task import Outcome, Task, bench_seed
from surgery.probes import make, probes
from surgery.probes.question import Completion, CompletionProbe, Probe, Question, Writing, WritingProbe
from surgery.probes.scoring import answer, answer_shapes, complete, complete_shapes
from surgery.probes.skills import FACTS
from surgery.probes.written import write, write_shapes
from surgery.records.recipe import Bench, Data

NEEDLE = "needle"
# Probes of whose answers it is asked whether greedy decoding would write them, in one forward. Chance is 0.
WRITTEN = tuple(name for name, kind in probes().items() if getattr(kind, "written", False))


@dataclass(frozen=True)
class Asking:
    """A probe by its name, with its options. length: of the prompt in tokens, where it is hidden in the held-out text. skill:
    whether it is asked for what a model is to keep, which stands behind the others in a report."""

    probe: str
    options: dict[str, Any]
    length: int | None = None
    skill: bool = False

    def made(self, options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data) -> Any:
        """The probe; None where the model does not read that much."""
        if self.length is None:
            facts = {"source": data.facts, "part": "bench"} if self.probe in FACTS else {}
            return make(self.probe, tokenizer=tokenizer, **self.options | facts)
        if self.length not in readable(options, tokenizer):
            return None
        return make(self.probe, tokenizer=tokenizer, length=self.length, **self.options, source=data.held_out_text)


def sized_options(name: str, size: int) -> dict[str, Any] | None:
    """A probe's options for a size, its first option: the number of what is to be remembered. None if it takes no such size.
    What else has no default is four times as large (a text among whose words the content words stand)."""
    needed = [field for field in dataclasses.fields(probes()[name]) if field.default is dataclasses.MISSING]
    fields: dict[str, Any] = {field.name: size if i == 0 else 4 * size for i, field in enumerate(needed)}
    try:
        make(name, **fields)
    except UserError:
        return None
    return fields


def check_askings(
    askings: Mapping[str, Asking], options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int
) -> None:
    """Raise UserError for a probe that cannot be asked in its size. askings: by task. Skills are checked where tuning's are."""
    for name, asking in ((name, asking) for name, asking in askings.items() if not asking.skill):
        try:
            probe = asking.made(options, tokenizer, data)
            if asking.probe == NEEDLE and probe is not None:
                # The text may be too short for any question, the shortest length for one of them.
                probe.check(options.limit if asking.length == min(options.lengths) else 1, bench_seed(seed))
        except UserError as error:
            raise UserError(f"bench, {name}: {error}") from error


def examples(
    probe: Probe | CompletionProbe | WritingProbe, written: bool, n: int, seed: int
) -> list[Question] | list[Completion] | list[Writing]:
    """What a probe asks. written: of the answer to a question only whether the model would write it."""
    if isinstance(probe, CompletionProbe):
        return probe.completions(n, seed)
    if isinstance(probe, WritingProbe):
        return probe.writings(n, seed)
    questions = probe.questions(n, seed)
    return [Completion(q.prompt, q.choices[q.answer]) for q in questions] if written else questions


def probe_tasks(
    name: str, asking: Asking, options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int
) -> list[Task]:
    """A task for each seed; none where the model does not read that much."""
    asks = asking.made(options, tokenizer, data)
    if asks is None:
        return []
    result: list[Task] = []
    known: set = set()
    for s in range(seed, seed + options.seeds):
        drawn = examples(asks, asking.probe in WRITTEN, options.limit, bench_seed(s))
        fresh = tuple(example for example in drawn if example not in known)
        known |= {*drawn}
        if fresh:
            digests = tuple(digest(repr(example)) for example in fresh)
            if isinstance(fresh[0], Writing):
                result.append(_writing_task(name, s, fresh, digests, options, tokenizer))
                continue
            written = isinstance(fresh[0], Completion)
            ask: Callable = complete if written else answer
            shapes_of: Callable = complete_shapes if written else answer_shapes

            def measure(
                model: PreTrainedModel, fresh: tuple = fresh, digests: tuple[str, ...] = digests, ask: Callable = ask
            ) -> Outcome:
                with watched(model) as inputs:
                    correct = ask(model, tokenizer, fresh, options.batch_size).correct
                return Outcome(correct.astype(float), digests, inputs())

            shapes = partial(shapes_of, tokenizer, fresh, options.batch_size)
            result.append(Task(name, s, f"{name} {' '.join(digests)}", measure, count=len(fresh), shapes=shapes))
    return result


def _writing_task(
    name: str, seed: int, asked: Sequence[Any], digests: tuple[str, ...], options: Bench, tokenizer: PreTrainedTokenizerBase
) -> Task:
    together = options.batch_size * options.window

    def measure(model: PreTrainedModel) -> Outcome:
        # What models write differs, and is read by them; what they were asked does not.
        return Outcome(write(model, tokenizer, asked, together), digests, digest(" ".join(digests)))

    shapes = partial(write_shapes, tokenizer, asked, together)
    return Task(name, seed, f"{name} {' '.join(digests)}", measure, count=len(asked), shapes=shapes)
