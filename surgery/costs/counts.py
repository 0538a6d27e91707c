"""What the stages of a run will do, counted from the recipe by the functions that do it: forwards, their tokens, and steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.choosing import way_of
from surgery.choosing.bounded import MORE, SEED, TEXTS
from surgery.choosing.task import Most
from surgery.evaluation.contexts import readable
from surgery.evaluation.suites import costly, measured, tasks, timings
from surgery.evaluation.task import Shapes, Task
from surgery.hybrids.patching import hooked
from surgery.locating.questions import asked
from surgery.models.answers import LENGTHS
from surgery.models.pace import Work
from surgery.probes.encoded import Asked
from surgery.probes.scoring import answer_shapes
from surgery.probes.skills import skill_questions, skills_of
from surgery.records.recipe import Bench, Recipe, Skill
from surgery.runtime.timing import Stopwatch
from surgery.tuning import plateau
from surgery.tuning.early_stopping import BATCH
from surgery.tuning.state_sizes import WINDOWS

COUNTED = 2_000  # examples of a task that are made; more go on in the same way
TRIED = 2  # examples of a task of the harness, which alone knows what it asks
WITH_BACKWARD = 3  # forwards: a forward and its backward
LOSS = 2  # forwards: what a batch of tuning costs that is measured only, by student and teacher


def beside_the_steps(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, a_step: Work) -> Work:
    """What tuning computes beside the steps, in forwards, at most. a_step: of these."""
    options, most, work = recipe.tune, recipe.tune.most_steps, Work()
    if (stopping := options.early_stopping) is not None:
        text = [(BATCH, options.text_tokens)] * -(-stopping.windows // BATCH)
        skills = skills_of(recipe.data, [lesson.probe for lesson in options.lessons])
        facts = _skill_shapes(recipe, tokenizer, skills, stopping.examples, recipe.seed)
        losses = a_step * (LOSS * -(-stopping.examples // options.batch_size))
        work += (Work.of([*text, *facts]) + losses) * (2 + -(-most // stopping.eval_steps))
    if options.steps == "auto":
        batches = -(-plateau.EXAMPLES // options.batch_size)
        work += a_step * (LOSS * batches * (1 + -(-most // plateau.EVAL_STEPS)))
    return work


def plans_measured(recipe: Recipe, heads: int) -> Most:
    """What plan.heads=auto and plan.by measure, at most, in a model of so many heads; nothing where they do not measure."""
    if not recipe.plan.measures:
        return Most(0)
    return way_of(recipe.plan.by).most(recipe.plan, heads, bool(skills_of_planning(recipe)))


def skills_of_planning(recipe: Recipe) -> tuple[Skill, ...]:
    """The skills that bound a plan."""
    return skills_of(recipe.data, {recipe.locate.probe, *(lesson.probe for lesson in recipe.tune.lessons)})


def trial_of(recipe: Recipe) -> Recipe:
    """The recipe of a trial: as many steps as plan.auto takes with a plan."""
    return recipe.model_copy(
        update={"tune": recipe.tune.model_copy(update={"steps": recipe.plan.auto.steps, "early_stopping": None})}
    )


def _skill_shapes(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, skills: Sequence[Skill], n: int, seed: int, batch_size: int = 64
) -> list[tuple[int, int]]:
    """(rows, tokens) of the forwards that answer n questions about each skill."""
    each = (skill_questions(skill, tokenizer, recipe.data, n, seed) for skill in skills)
    return [shape for questions in each for shape in answer_shapes(tokenizer, questions, batch_size)]


def planning(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, heads: int) -> Work:
    """What plan measures, in forwards; without the steps of its trials."""
    options, work = recipe.plan, Work()
    halving = options.window is not None and options.window.groups == "auto" and options.window.sites is None
    if options.measures or halving:
        _, questions_of = asked(tokenizer, recipe.locate.probe, recipe.locate.options)
        each: Sequence[Asked] = questions_of(max(2, options.auto.examples), recipe.seed)
        shapes = answer_shapes(tokenizer, each, recipe.locate.batch_size)  # type: ignore[arg-type]
        most = plans_measured(recipe, heads)
        work += Work.of(shapes) * most.asked
        skills, n = skills_of_planning(recipe), options.auto.skill_examples
        windows = options.auto.windows * (MORE if skills else 1)
        shapes += [(TEXTS, recipe.tune.text_tokens)] * -(-windows // TEXTS)
        shapes += _skill_shapes(recipe, tokenizer, skills, n, recipe.seed + SEED, recipe.locate.batch_size)
        work += Work.of(shapes) * (most.plans + (heads.bit_length() + 1 if halving else 0))
    if options.state_size is not None:
        work += Work.of([(1, recipe.tune.text_tokens)]) * (WITH_BACKWARD * WINDOWS)
    return work


@dataclass(frozen=True)
class Benching:
    """What bench does. work: the forwards of each model. longest: tokens of a row. making, encoding: the seconds of making what
    is asked, once, and of encoding it, for each model. exact: whether the forwards are; at_most: whether there may be fewer, as
    writing ends once all answers are written."""

    work: Work
    longest: int
    making: float
    encoding: float
    exact: bool
    at_most: bool


def benching(recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> Benching:
    """What bench does with a model. limit: examples of a task that are made for it; of those that take long to make, as many as
    two batches hold."""
    options = recipe.bench
    few = options.model_copy(update={"limit": min(options.limit, limit or COUNTED), "task_limit": TRIED})
    suites, slow = measured(options), costly() & measured(options)
    asked = [few.model_copy(update={"suites": tuple(suites - slow)})]
    for length in readable(options, tokenizer) if slow else ():
        two = min(few.limit, max(2, 2 * (options.batch_size * options.window // length)))
        asked.append(few.model_copy(update={"suites": tuple(slow), "tasks": (), "contexts": (length,), "limit": two}))
    shapes = timed_shapes(options, readable(options, tokenizer))
    work, longest = Work.of(shapes), max((tokens for _, tokens in shapes), default=0)
    making = encoding = 0.0
    exact = all(part.limit == options.limit for part in asked)
    for part in asked:
        watch = Stopwatch(model.device)
        made = tasks(part, tokenizer, recipe.data, recipe.seed)
        if slow & {*part.suites}:
            making += watch.read()[0] * options.limit / part.limit
        for task in made:
            if task.shapes is None:
                tried, exact = _tried(task, model), False
                whole = min(task.there, options.task_limit or task.there)
                longest, work = max(longest, tried.largest), work + tried * (whole / max(1, task.count))
                continue
            watch = Stopwatch(model.device)
            shapes = task.shapes()  # encodes all that is asked, as every model's turn does
            more = options.limit / part.limit if task.count == part.limit and task.metric == "accuracy" else 1.0
            work, encoding = work + Work.of(shapes) * more, encoding + watch.read()[0] * more
            longest = max(longest, *(tokens for _, tokens in shapes), 0)
    return Benching(work, longest, making, encoding, exact, bool(slow))


def timed_shapes(options: Bench, contexts: list[int]) -> Shapes:
    """Of the forwards that are timed. A token after a cache counts as a row of one."""
    whether = [(1, 1)] if contexts else []  # whether it goes on from a cache at all
    return [*whether, *(shape for timing in timings(options, contexts) for shape in timing.shapes)]


def _tried(task: Task, model: PreTrainedModel) -> Work:
    """What a few examples of a task of the harness take, by doing them."""
    shapes: list[tuple[int, int]] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids: Any = kwargs.get("input_ids", args[0] if args else None)
        shapes.append((len(ids), ids.shape[1]))

    with torch.no_grad(), hooked(lambda: [model.register_forward_pre_hook(note, with_kwargs=True)]):
        task.measure(model)
    return Work.of(shapes)


def proof_shapes(new: int) -> list[tuple[int, int]]:
    """(rows, tokens) of the forwards by which one side proves an export, with so many new tokens."""
    if not new:
        return []
    return [*((1, length) for length in LENGTHS), (len(LENGTHS), max(LENGTHS)), *[(len(LENGTHS), 1)] * (new - 1)]
