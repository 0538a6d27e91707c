"""Did it help? One answer from a report, in words, for the terminal, report.md and report.html.

A gain is called a gain only where the base retrieves at all, where the difference holds among all comparisons (Holm), and where
a control was measured and none does as well. A model that gains there and loses another skill beyond BOUND is no "yes": the
answer names both. Of a model that has windows and no grafts, the question is whether retrieval is kept within BOUND. What it
costs is told, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from surgery.evaluation.results import HITS, OTHERS, ModelReport, Results, is_loss, needle_tasks, value
from surgery.evaluation.suites import wholes
from surgery.probes.needle import CHOICES
from surgery.probes.skills import BOUND, BOUND_OF_LOSS
from surgery.records.names import is_control
from surgery.statistics import CEILING, Estimate, Evidence, Proportion, at_chance, written

UNSEEN = "kv_unseen"
CERTAIN = 0.02  # two points of accuracy, or a change of the loss by which perplexity changes by 2%
NAMED = 6  # tasks in a sentence
SKILLS = ("letters", "knowledge")  # what a model is judged by where its heads were located by it; else by dictionaries

Verdict = Literal["yes", "mixed", "perhaps", "unclear", "no", "not to be judged"]


@dataclass(frozen=True)
class Judgement:
    """Of one model. answer: one sentence that begins with the verdict. details: sentences on the controls and the cost."""

    model: str
    verdict: Verdict
    answer: str
    details: tuple[str, ...]


def did_it_help(report: Results) -> str:
    """The answer with controls and cost: a paragraph for the tuned model of a run, one for each model of a comparison."""
    judgements = judge(report)
    if not judgements:
        return "Did it help? No hybrid was measured."
    several = len(judgements) > 1
    return "\n\n".join(
        " ".join([f"Did {each.model if several else 'it'} help? {each.answer}", *each.details]) for each in judgements
    )


def judge(report: Results) -> list[Judgement]:
    """One judgement for each hybrid of the report; of a run, for the tuned one alone."""
    names = [name for name in list(report.models)[1:] if not is_control(name)]
    if {"spliced", "tuned"} <= {*names}:
        names.remove("spliced")
    return [_judged(report, name) for name in names]


def lost(report: Results, name: str) -> list[str]:
    """The tasks at which a model falls from the base by more than BOUND, with an interval that leaves out 0; the largest fall
    first."""
    model = report.models[name]
    falls = {task: change.value if is_loss(task) else -change.value for task, change in model.change.items()}
    beyond = [
        task
        for task, change in model.change.items()
        if falls[task] > (BOUND_OF_LOSS if is_loss(task) else BOUND) and (change.ci95[0] > 0 or change.ci95[1] < 0)
    ]
    return sorted(beyond, key=lambda task: falls[task], reverse=True)


def said_of_losses(report: Results, name: str) -> str:
    """What `lost` names, each with the model's result and the base's; empty if nothing is."""
    return _named(lost(report, name), report.base, report.models[name], ", ")


def _named(tasks: list[str], base: ModelReport, model: ModelReport, between: str) -> str:
    """The first of some tasks, each with the model's result and the base's, and how many more there are."""
    before, after = base.results(), model.results()
    each = (f"{heading(task)} {written(value(after[task]))} (base {written(value(before[task]))})" for task in tasks[:NAMED])
    return between.join(each) + (f" and {len(tasks) - NAMED} more" if len(tasks) > NAMED else "")


def heading(task: str) -> str:
    """A task's name in a table."""
    if task.startswith(f"{UNSEEN}."):
        return f"KV {task.removeprefix(f'{UNSEEN}.')}, unseen keys"
    family, _, size = task.partition(".")
    if family in wholes():
        return f"{wholes()[family]}, {int(size):,} tokens"
    if family in (HITS, OTHERS):
        return f"{family.replace('_', ' ')} at {task.removeprefix(f'{family}.')} (nats)"
    return task.replace("kv.", "KV ")


def verdict(task: str, change: Estimate, said: Evidence) -> str:
    """What a difference says, in words. Perhaps: its own interval leaves out 0, which among all comparisons may be chance."""
    loss, short = is_loss(task), _direction(task, change, said)
    if said.differs:
        return f"{short} (p = {said.p_holm:.2g})"
    if short.startswith("perhaps"):
        return f"{short} (p = {said.p:.2g} by itself, {said.p_holm:.2g} among all comparisons)"
    if said.detectable is None:
        return "no difference seen; too few examples to see a small one"
    if said.detectable <= CERTAIN:
        return f"no difference seen, and n = {said.n} was enough to see {'2%' if loss else '2 points'}"
    least = f"{100 * said.detectable:.1f}{'%' if loss else ' points'}"
    return f"no difference seen, but n = {said.n} shows only differences of {least} or more"


def _direction(task: str, change: Estimate, said: Evidence | None) -> str:
    """better, worse, either with "perhaps", or no difference seen."""
    direction = "better" if (change.value < 0) == is_loss(task) else "worse"
    if said is not None and said.differs:
        return direction
    return f"perhaps {direction}" if change.ci95[0] > 0 or change.ci95[1] < 0 else "no difference seen"


def _judged(report: Results, name: str) -> Judgement:
    base, model = report.base, report.models[name]
    skill = _located_skill(report)
    if not (base.kv or skill):
        ways: list[Callable[[Results, str], Judgement | None]] = [_judged_by_hits, _judged_by_needles]
        ways += [partial(_judged_by_whole, whole) for whole in wholes()]
        for judged_by in ways:
            if (decided := judged_by(report, name)) is not None:
                return decided
        *most, last = "quick", "retrieval", "hits", "length", *wholes()
        answer = f"Not to be judged: retrieval was not measured (bench.suites without {', '.join(most)} or {last})."
        return Judgement(name, "not to be judged", answer, (_cost(base, model),))
    size = "" if skill else max(base.kv, key=int)  # the largest size, and not the one that looks best
    task = skill or f"kv.{size}"
    change, accuracy = model.change.get(task), base.results()[task]
    if change is None:
        answer = f"Not to be judged: the report does not compare its answers with the base's ({task})."
        return Judgement(name, "not to be judged", answer, (_cost(base, model),))
    direction = _direction(task, change, model.evidence.get(task))
    least = report.located.chance if skill and report.located is not None else 1 / int(size)
    where = f"on {skill}" if skill else f"with {size} pairs"
    compared = (
        f"{where} {name} answers {value(model.results()[task]):.3f} of the questions, "
        f"the base {value(accuracy):.3f} (difference {change}, chance {least:.3f})"
    )
    chance, (control, clear) = _chance(report), _controls(report, name, task)
    verdict: Verdict = "no"
    if chance and "better" in direction:
        verdict, answer = "not to be judged", (
            f"Not to be judged: the base is at chance {chance}, so its heads cannot be located by that. "
            f"It is true that {compared}, but this difference cannot be attributed to an edit of located heads; choose a "
            "probe that the base can do in part."
        )  # fmt: skip
    elif chance:
        answer = f"No: {compared}. The base is at chance {chance}; choose a probe that it can do in part."
    elif model.plan is not None and not model.plan.sites:
        return _judged_by_what_is_kept(report, name, task, compared)
    else:
        losses = said_of_losses(report, name)
        verdict, answer = _answer(direction, compared, clear, "ask more examples (bench.limit)", losses)
        if direction == "no difference seen" and value(accuracy) >= CEILING:
            answer += " The base is nearly perfect on this probe, so a gain could not show."
            answer += "" if skill else " Ask for more pairs."
    return Judgement(name, verdict, answer, tuple(filter(None, (control, _text(base, model), _cost(base, model)))))


def _located_skill(report: Results) -> str | None:
    """The task that the heads were located by, where that is letters or facts: then it is what was to get better."""
    probe = report.located.probe.split()[0] if report.located is not None else None
    return probe if probe in SKILLS and probe in report.base.results() else None


def _answer(direction: str, compared: str, clear: bool | None, advice: str, losses: str) -> tuple[Verdict, str]:
    """What a comparison with the base says. clear: whether no control does about as well; None: none was measured. advice: how
    to see more. losses: what else fell beyond its bound."""
    if direction == "better" and losses:
        return "mixed", f"It gains and loses: {compared}; it loses {losses}."
    if direction == "better" and clear:
        return "yes", f"Yes: {compared}."
    if direction == "better":
        lacking = "no control was measured" if clear is None else "a control does about as well"
        return "unclear", f"Unclear: {compared}, but {lacking}."
    if direction == "perhaps better":
        return "perhaps", f"Perhaps: {compared}, which may be chance among so many comparisons; {advice}."
    return "no", f"No difference seen: {compared}." if direction == "no difference seen" else f"No, {direction}: {compared}."


def _judged_by_what_is_kept(report: Results, name: str, task: str, compared: str) -> Judgement:
    """Of windows alone. compared: what the task says, in words."""
    base, model = report.base, report.models[name]
    change, losses = model.change[task], said_of_losses(report, name)
    verdict: Verdict = "no"
    if change.ci95[1] < -BOUND:
        answer = f"No, retrieval is not kept: {compared}."
    elif change.ci95[0] < -BOUND:
        verdict = "unclear"
        answer = f"Unclear: {compared}, so a fall by more than {BOUND:g} is not ruled out; ask more examples (bench.limit)."
    elif losses:
        verdict, answer = "mixed", f"It keeps and loses: {compared}; it loses {losses}."
    else:
        verdict, answer = "yes", f"Yes, retrieval is kept: {compared}."
    controls = {
        key: each for key, each in report.models.items()
        if is_control(key) and each.plan is not None and task in each.change and key.endswith("_tuned") == (name == "tuned")
    }  # fmt: skip
    details = [_cache_left(base, model), *(_beside(key, each, task, change) for key, each in controls.items())]
    if not controls:
        details.append("Windows at other heads were not measured, so it is not shown that the choice of heads matters.")
    return Judgement(name, verdict, answer, tuple(filter(None, [*details, _text(base, model), _cost(base, model)])))


def _beside(control: str, measured: ModelReport, task: str, change: Estimate) -> str:
    """A sentence on windows at other heads. change: what the chosen ones change."""
    said = f"Windows at random heads ({control}) answer {value(measured.results()[task]):.3f}"
    worse = measured.change[task].ci95[1] < change.ci95[0]
    return f"{said}." if worse else f"{said}: it is not shown that the choice of heads matters."


def _cache_left(base: ModelReport, model: ModelReport) -> str:
    """A sentence on the cache after the most tokens; empty where it was not measured."""
    if not (base.cost and model.cost):
        return ""
    before, after = base.cost[-1], model.cost[-1]
    return (
        f"After {after.context:,} tokens its cache takes {after.cache_bytes / 1024:,.0f} KiB, the base's "
        f"{before.cache_bytes / 1024:,.0f} KiB."
    )


def _judged_by_hits(report: Results, name: str) -> Judgement | None:
    """By the loss on recall hits in the longest rows, where no dictionaries were asked; None if it was not measured either."""
    base, model = report.base, report.models[name]
    task = _longest_hits(base)
    if task is None or task not in model.change:
        return None
    others = f"{OTHERS}{task.removeprefix(HITS)}"
    rest = (
        f"Other tokens of the same text: {model.change[others]} nats{_said(model, others)}." if others in model.change else ""
    )
    compared = f"on {_said_of_hits(base, model, task)}"
    return _judged_by(task, compared, "take more text (bench.windows)", report, name, rest)


def _judged_by_needles(report: Results, name: str) -> Judgement | None:
    """By the needle in the middle of the longest prompts, where neither dictionaries were asked nor hits measured; None if no
    needle was asked for either. That the base is at chance there, is no objection: at that length it may have forgotten."""
    base, model = report.base, report.models[name]
    tasks = needle_tasks(base.tasks).get("needle", {})
    length = max(tasks, default=0)
    if tasks.get(length) not in model.change:
        return None
    task = tasks[length]
    compared = (
        f"with a needle in the middle of {length:,} tokens {name} answers {value(model.tasks[task]):.3f} of the questions, the "
        f"base {value(base.tasks[task]):.3f} (difference {model.change[task]}, chance {1 / CHOICES:.3f})"
    )
    return _judged_by(task, compared, "ask more examples (bench.limit)", report, name)


def _judged_by_whole(whole: str, report: Results, name: str) -> Judgement | None:
    """By all tasks of a suite together (RULER), where nothing else was asked, at the longest length at which either model
    writes any answer; None if none was asked. Guessing writes none, so a base at 0 is no objection."""
    base, model, title = report.base, report.models[name], wholes()[whole]
    tasks = {int(task.partition(".")[2]): task for task in model.change if task.startswith(f"{whole}.")}
    if not tasks:
        return None
    both = {n: (value(model.tasks[task]), value(base.tasks[task])) for n, task in tasks.items()}
    if (length := max((n for n, shares in both.items() if any(shares)), default=0)) == 0:
        lengths = " and ".join(f"{n:,}" for n in sorted(tasks))
        answer = f"Not to be judged: neither {name} nor the base writes any answer of {title}, at {lengths} tokens."
        return Judgement(name, "not to be judged", answer, (_cost(base, model),))
    compared = (
        f"of {title}'s answers, after {length:,} tokens, {name} writes {both[length][0]:.3f}, the base {both[length][1]:.3f} "
        f"(difference {model.change[tasks[length]]}, all tasks)"
    )
    return _judged_by(tasks[length], compared, "ask more examples (bench.limit)", report, name)


def _judged_by(task: str, compared: str, advice: str, report: Results, name: str, rest: str = "") -> Judgement:
    """By one task. compared: what it says, in words. rest: a sentence on what else was measured."""
    base, model = report.base, report.models[name]
    control, clear = _controls(report, name, task)
    direction, losses = _direction(task, model.change[task], model.evidence.get(task)), said_of_losses(report, name)
    verdict, answer = _answer(direction, compared, clear, advice, losses)
    return Judgement(name, verdict, answer, tuple(filter(None, (control, rest, _cost(base, model)))))


def _longest_hits(base: ModelReport) -> str | None:
    """The task of recall hits in the longest rows."""
    lengths = [int(task.partition(".")[2]) for task in base.tasks if task.startswith(f"{HITS}.")]
    return f"{HITS}.{max(lengths)}" if lengths else None


def _said_of_hits(base: ModelReport, model: ModelReport, task: str) -> str:
    length = int(task.partition(".")[2])
    return (
        f"recall hits of text, in rows of {length:,} tokens, its loss is {value(model.tasks[task]):.3f} nats, the base's "
        f"{value(base.tasks[task]):.3f} (difference {model.change[task]})"
    )


def _text(base: ModelReport, model: ModelReport) -> str:
    """A sentence on recall hits, where they were measured beside dictionaries."""
    task = _longest_hits(base)
    if task is None or task not in model.change:
        return ""
    said = f"{_said_of_hits(base, model, task)}{_said(model, task)}."
    return said[0].upper() + said[1:]


def _chance(report: Results) -> str:
    """Where the base is no better than guessing: on the probe that located the heads, or on every size of retrieval that was
    measured. Empty where it is better."""
    located, kv = report.located, report.base.kv
    if located is not None and at_chance(located.accuracy, located.chance):
        return f"on the probe that located the heads ({located.probe}: {located.accuracy}, chance {located.chance:.3f})"
    if all(at_chance(accuracy, 1 / int(size)) for size, accuracy in kv.items()):
        size = min(kv, key=int)
        return f"on this probe (even with {size} pairs: {kv[size]}, chance {1 / int(size):.3f})"
    return ""


def _controls(report: Results, name: str, task: str) -> tuple[str, bool | None]:
    """The control that comes closest to a model, and whether the model is clearly better than it (their intervals of the
    difference to the base have nothing in common; None: there is no control)."""
    controls = {other: each for other, each in report.models.items() if is_control(other) and task in each.change}
    if not controls:
        return (
            "What made the difference is not known: the same tuning without a graft may do as well. "
            "`surgery bench BASE HYBRID` measures that control, for a hybrid whose folder holds its recipe; `surgery run` also "
            "measures grafts at random heads (bench.controls)."
        ), None
    sign = -1 if is_loss(task) else 1
    best = max(controls, key=lambda other: sign * controls[other].change[task].value)
    accuracy = value(controls[best].results()[task])
    own, other = (models[key].change[task].ci95 for models, key in ((report.models, name), (controls, best)))
    clear = own[1] < other[0] if sign < 0 else own[0] > other[1]
    said = "The only control" if len(controls) == 1 else f"The best of {len(controls)} controls"
    said += f" is {best} with {accuracy:.3f}"
    if clear:
        return f"{said}.", True
    lacking = "the graft helps" if controls[best].plan is None else "the choice of heads matters"
    return f"{said} ({controls[best].description}): it is not shown that {lacking}.", False


def _cost(base: ModelReport, model: ModelReport) -> str:
    """Knowledge and perplexity, and what else got worse."""
    before, after = base.results(), model.results()
    parts = []
    for skill in reversed(SKILLS):
        kept, had = after.get(skill), before.get(skill)
        if isinstance(kept, Proportion) and isinstance(had, Proportion) and not _guessed(base, skill):
            parts.append(f"{skill} {kept.accuracy:.3f} (base {had.accuracy:.3f}{_said(model, skill)})")
    if model.perplexity is not None and base.perplexity is not None:
        change = model.perplexity.loss.value - base.perplexity.loss.value
        parts.append(
            f"loss on held-out text {change:+.4f} nats per token (perplexity {written(model.perplexity.value)}, base "
            f"{written(base.perplexity.value)}{_said(model, 'perplexity')})"
        )
    worse = [
        task
        for task, change in model.change.items()
        if task not in (*SKILLS, "perplexity") and _direction(task, change, model.evidence.get(task)) == "worse"
    ]
    costs = f"Cost: {'; '.join(parts)}." if parts else "Cost: knowledge and perplexity were not measured."
    costs = " ".join([costs, *_says_nothing(base)])
    return f"{costs} Worse: {_named(worse, base, model, '; ')}." if worse else costs


def _says_nothing(base: ModelReport) -> list[str]:
    """Sentences on what the base does not know, so that keeping it says nothing."""
    said = []
    least = base.guessing.get("perplexity")
    if base.perplexity is not None and least is not None and base.perplexity.loss.value >= least:
        said.append(
            "The base is no better than guessing among all tokens on the held-out text "
            f"({base.perplexity.loss.value:.2f} nats, log(vocabulary) {least:.2f}), so losses there say nothing: name a "
            "text that it knows (data.held_out_text)."
        )
    for skill in reversed(SKILLS):
        if _guessed(base, skill):
            said.append(
                f"The base is at chance on {skill} ({base.results()[skill]}, chance {base.guessing[skill]:.3f}), so it has "
                f"none to lose{': name facts that it knows (data.facts)' if skill == 'knowledge' else ''}."
            )
    if base.invented:
        said.append(
            f"{' and '.join(base.invented)} are those of the small invented world of the built-in models, which the base was "
            "not trained on: name its own."
        )
    return said


def _guessed(base: ModelReport, skill: str) -> bool:
    """Whether the base is at chance on a skill, as far as that is known."""
    result, least = base.results().get(skill), base.guessing.get(skill)
    return isinstance(result, Proportion) and least is not None and at_chance(result, least)


def _said(model: ModelReport, task: str) -> str:
    """What the difference to the base says, after a comma; nothing where the report has none. Of a skill, also a fall beyond
    BOUND that too few questions cannot rule out."""
    change = model.change.get(task)
    if change is None:
        return ""
    said = _direction(task, change, model.evidence.get(task))
    unseen = said == "no difference seen" and task in SKILLS and change.ci95[0] < -BOUND
    return f", {said}" + (f", a fall by {-change.ci95[0]:.3f} not ruled out" if unseen else "")
