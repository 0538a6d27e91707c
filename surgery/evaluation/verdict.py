"""Did it help? One answer from what was measured, in words.

The main comparison, a model and a measurement, is declared before anything is measured. It is a "yes" where the base retrieves
at all, the model is better than the base, no control does as well, and no other skill is lost beyond its bound; what is lost is
named. Where nothing is gained, the verdict says what to try.
"""

from collections.abc import Mapping, Sequence

from surgery.evaluation.controls import CONTROLS, NAMES, PREFIX
from surgery.records.report import Answer, Change, Estimate, Measurement, ModelReport, Remedy, Verdict, figure
from surgery.runtime.progress import size

BOUND, BOUND_OF_LOSS = 0.02, 0.01  # what counts as lost: accuracy, and nats per token
HALF = 0.5  # of what was missing: a "yes" that stays below it is not the last word
CEILING = 0.98  # an accuracy above which hardly anything is left to gain
ORDER = ("kv", "kv_unseen", "bigrams", "needle", "multiple_choice")  # what a verdict is about, the first that was measured
MORE_STEPS = "more steps (tune.steps, or tune.max_steps where that is auto)"
MUCH = 0.1  # of the tokens of text, on which a graft acts; plan.share is 0.01 by default
MOST = 4  # measurements in a sentence
FEW = 50  # questions, below which an interval promises little


def main_measurement(names: Sequence[str]) -> str:
    """The measurement that the verdict is about, known before anything is measured: the largest dictionaries; without any, the
    longest rows with repeated rare bigrams, the longest needle, multiple choice, or the first of all."""
    for family in ORDER:
        found = [name for name in names if name.partition(".")[0] == family]
        if found:
            return max(found, key=lambda name: int(name.partition(".")[2] or 0))
    return names[0]


def judge(
    measurements: Mapping[str, Measurement],
    models: Mapping[str, ModelReport],
    name: str,
    measurement: str,
    share: Estimate | None,
) -> Verdict:
    """The verdict on one model. The base is the first of `models`. share: of what was missing to a perfect score, how much was
    gained, where that is shown."""
    base, model, asked = next(iter(models.values())), models[name], measurements[measurement]
    if model is base:
        sentence = "Cannot be judged: only the base was measured."
        return Verdict(answer="not judged", model=name, measurement=measurement, sentence=sentence)
    change = model.changes[measurement]
    better = change.shown and (change.mean < 0) == (asked.metric == "loss")
    chance = f", chance {asked.chance:.3f}" if asked.chance else ""
    scored = "loses {} nats per token" if asked.metric == "loss" else "scores {}"
    who = "it" if name in NAMES else model.description
    compared = (
        f"on {asked.label} {who} {scored.format(figure(model.results[measurement]))}, the base "
        f"{figure(base.results[measurement])} (difference {change}{chance})"
    )
    if share is not None and better:
        compared += f", {100 * share.mean:.0f}% [{100 * share.low:.0f}%, {100 * share.high:.0f}%] of what was missing"
    losses = lost(measurements, model)
    controls = {key: each for key, each in models.items() if each.role == "control" and each.behind is not None}
    # Controls that the main model is not shown to be better than.
    close = [
        each
        for each in controls.values()
        if (behind := each.behind) is not None and not (behind.high < 0 if asked.metric == "loss" else behind.low > 0)
    ]
    answer, sentence = _answer(change, better, compared, losses, close)
    if at_chance(base, measurements, measurement):
        answer, n = "not judged", base.results[measurement].n
        why = "what is gained here, tuning has taught" if better else "a skill that the edit cannot add"
        few = f"{n} questions on {asked.label} do not tell the base from chance"
        known = few if n < FEW else f"the base is at chance on {asked.label}, {why}"
        sentence = f"Cannot be judged: {known}; {compared}."
    details = [_said_of_tuning(models, name, asked, measurement), _said_of_controls(controls, asked, measurement)]
    details += [_said_of_losses(measurements, base, model, losses, answer), _said_of_price(base, model)]
    if (on_text := model.on_text) is not None:
        details.append(on_text.sentence())
        before = models["spliced"].on_text if "spliced" in models else None
        untrained = before.acts.mean if before and before.acts else 1.0  # 1: there may be no null keys
        if on_text.acts is not None and on_text.acts.mean > MUCH and min(on_text.acts.mean, untrained) < 1:
            if untrained < 1 and model.back_to is None:
                details[-1] += f" Untrained: {100 * untrained:.2g}%."
            details[-1] += (
                " That is much more text than plan.share asks for: plan.keep_skills=true makes null keys that stay closed on "
                "text, and fewer heads (plan.heads) act on less."
            )
    far = answer == "yes" and share is not None and share.high < HALF
    remedy, advice = _advise(measurements, models, name, measurement, answer) if answer != "yes" or far else ("", "")
    return Verdict(
        answer=answer,
        model=name,
        measurement=measurement,
        sentence=sentence,
        details=tuple(filter(None, details)),
        advice=advice,
        remedy=remedy,
    )


def _answer(
    change: Change, better: bool, compared: str, losses: Sequence[str], close: Sequence[ModelReport]
) -> tuple[Answer, str]:
    if better and close:
        return "unclear", f"Unclear: {compared}; but a control does about as well: {close[0].description}."
    if better and losses:
        return "mixed", f"It gains and loses: {compared}; it loses {', '.join(losses[:MOST])}."
    if better:
        return "yes", f"Yes: {compared}."
    return "no", f"No, it is worse: {compared}." if change.shown else f"No difference seen: {compared}."


def lost(measurements: Mapping[str, Measurement], model: ModelReport) -> list[str]:
    """The measurements in which a model falls from the base beyond the bound, by an interval that leaves out 0, in words."""
    falls = []
    for name, change in model.changes.items():
        is_loss = measurements[name].metric == "loss"
        fall, outside = change.mean if is_loss else -change.mean, change.low > 0 or change.high < 0
        if change.n > 1 and outside and fall > (BOUND_OF_LOSS if is_loss else BOUND):
            falls.append((fall, f"{measurements[name].label} ({change.mean:+.3f})"))
    return [words for _, words in sorted(falls, reverse=True)]


def at_chance(base: ModelReport, measurements: Mapping[str, Measurement], measurement: str) -> bool:
    """Whether the base is no better than guessing, in the main measurement and in all smaller sizes of it."""
    family = measurement.partition(".")[0]
    guesses = {name: m.chance for name, m in measurements.items() if name.partition(".")[0] == family and m.chance}
    return bool(guesses) and all(base.results[name].low <= chance for name, chance in guesses.items())


def _said_of_tuning(models: Mapping[str, ModelReport], name: str, asked: Measurement, measurement: str) -> str:
    """What tuning undid, and what it lost."""
    model, untrained = models[name], models.get("spliced")
    if model.back_to is not None:
        which = f"those of step {model.back_to}" if model.back_to else "those before tuning"
        return f"Tuning raised the loss on examples, so the weights are {which}: lower tune.learning_rate."
    if untrained is None or untrained is model or name not in NAMES:
        return ""
    before, after = untrained.results[measurement].mean, model.results[measurement].mean
    if (after - before if asked.metric == "loss" else before - after) <= BOUND:
        return ""
    return f"Untrained it {'loses' if asked.metric == 'loss' else 'scores'} {figure(untrained.results[measurement])}."


def _said_of_controls(controls: Mapping[str, ModelReport], asked: Measurement, measurement: str) -> str:
    unknown = "whether tuning without attention would do as well is not known"
    if not controls:
        return f"No control was measured: {unknown}."
    sign = -1 if asked.metric == "loss" else 1
    best = max(controls.values(), key=lambda each: sign * each.results[measurement].mean)
    what = "The only control" if len(controls) == 1 else f"The best of {len(controls)} controls"
    does = "loses" if asked.metric == "loss" else "scores"
    said = f"{what} {does} {figure(best.results[measurement])} ({best.description}); the difference to it is {best.behind}."
    undone = [each.description for each in controls.values() if each.back_to is not None]
    said += f" The loss of some rose in tuning, and their best weights came back: {'; '.join(undone)}." if undone else ""
    if any(CONTROLS[name.removeprefix(PREFIX)].trained for name in controls):
        return said
    return f"{said} No control was trained: {unknown}."


def _said_of_losses(
    measurements: Mapping[str, Measurement], base: ModelReport, model: ModelReport, losses: Sequence[str], answer: Answer
) -> str:
    kept, unsure, guessed = [], [], []  # whether a fall beyond the bound is ruled out
    for name in ("multiple_choice", "knowledge", "text"):
        chance = measurements[name].chance if name in model.changes else None
        if chance and base.results[name].low <= chance:
            guessed.append(measurements[name].label)
        elif name in model.changes:
            before, after, change = figure(base.results[name]), figure(model.results[name]), model.changes[name]
            words = f"{measurements[name].label} {before} to {after}"
            is_loss = measurements[name].metric == "loss"
            if losses or (change.n > 1 and (change.high < BOUND_OF_LOSS if is_loss else change.low > -BOUND)):
                kept.append(f"{words} ({change.mean:+.3f})")
            else:
                unsure.append(f"{words} ({change}, n = {change.n:,})")
    said = [f"{'Other skills' if losses else 'Kept'}: {'; '.join(kept)}."] if kept else []
    said += [f"The base is at chance on {' and '.join(guessed)}: nothing to keep."] if guessed else []
    said += [f"Not shown to fall, nor to be kept: {'; '.join(unsure)}."] if unsure else []
    said += [f"Lost: {', '.join(losses[:MOST])}."] if losses and answer != "mixed" else []
    return " ".join(said)


def _said_of_price(base: ModelReport, model: ModelReport) -> str:
    if not (base.costs and model.costs):
        return ""
    before, after = base.costs[-1], model.costs[-1]
    token = after.token
    unsure = ", which is not shown to differ from it" if token.low <= 1 <= token.high else ""
    return (
        f"Price after {after.context:,} tokens: a cache of {size(after.cache_bytes)} (base {size(before.cache_bytes)}), "
        f"{token.mean:.2f} times the base's time per token [{token.low:.2f}, {token.high:.2f}]{unsure}."
    )


def _advise(
    measurements: Mapping[str, Measurement], models: Mapping[str, ModelReport], name: str, measurement: str, answer: Answer
) -> tuple[Remedy, str]:
    """What to try, from what is known: what `surgery run` can do about it, and all of it in words."""
    base, model, asked = next(iter(models.values())), models[name], measurements[measurement]
    change, is_loss = model.changes[measurement], asked.metric == "loss"
    remedy: Remedy = ""
    said = []
    gains = [
        f"{m.label} {figure(base.results[key])} to {figure(model.results[key])}"
        for key, m in measurements.items()
        if key != measurement
        and m.metric == asked.metric
        and (c := model.changes.get(key))
        and c.shown
        and (c.mean < 0) == is_loss
    ]
    if answer == "not judged":
        return "", f"In place of {asked.label} take a size or a probe that the base does in part (locate.options, bench.pairs)."
    if model.sites and all(each.mean == 0 for each in model.changes.values()):
        closed = "The grafts closed in tuning: all answers are the base's."
        return "", f"{closed} Lower tune.kl_weight, or take hints (tune.hints={{}})."
    if answer == "no" and model.back_to is not None:  # what to do is said of tuning
        return "", ""
    untrained = models.get("spliced", model).changes.get(measurement)  # whether it is better, beyond both intervals
    tuned = untrained is not None and (untrained.high < change.low if is_loss else untrained.low > change.high)
    harm, full = answer == "no" and (change.shown or tuned), not is_loss and base.results[measurement].mean >= CEILING
    if harm:
        remedy = "lower rate" if tuned else ""
        did = "Tuning did the harm: untrained it does better. " * tuned
        fewer = ", or graft fewer heads (plan.heads)" * (not tuned)
        said.append(f"{did}Lower tune.learning_rate{fewer}.")
    elif answer == "no" and full:
        said.append("The base is nearly perfect here, so a gain could not show: ask for more pairs (bench.pairs).")
    elif answer == "no" and not change.shown and change.detectable and change.detectable > 2 * BOUND:
        said.append(f"n = {change.n:,} shows differences of {change.detectable:.3f} or more: ask more (bench.limit).")
    if answer == "no" and gains:
        said.append(f"It does gain elsewhere: {'; '.join(gains[:MOST])}; locate and tune nearer to {asked.label}.")
    if answer == "no" and model.sites and not (gains or harm or full):
        remedy = "more heads"
        said.append(f"Try more heads (plan.heads), {MORE_STEPS}, or hints and adapters (tune.hints, tune.lora).")
    if answer == "mixed":
        said.append("Let null keys read the query (plan.keep_skills=true), or let the grafts act on less text (plan.share).")
    if answer == "yes":
        remedy = "more heads"
        said.append(
            f"Most of it is still missing. Try more heads (plan.heads), {MORE_STEPS}, or adapters, which change "
            "what the base says, too (tune.lora={target_modules: [in_proj, out_proj]})."
        )
    if answer == "unclear":
        said.append("A cheaper change may be enough; compare the controls in the table.")
    return remedy, " ".join(said)
