"""Before a search begins: how well does the base do what it is asked, and how long would measuring every head exactly take?"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from surgery.locating.exact import Exact
from surgery.locating.ledger import Ledger
from surgery.locating.passes import batch_of, counted
from surgery.locating.questions import QuestionSet, probe_in_words
from surgery.locating.subject import Subject
from surgery.models.answers import settle
from surgery.models.pace import Pace, forward_pace
from surgery.probes.encoded import padded
from surgery.probes.question import Question
from surgery.records.reading import parse_json
from surgery.records.recipe import Locate
from surgery.records.record import read_text, write_text
from surgery.runtime import processes
from surgery.runtime.progress import busy, duration, say
from surgery.statistics import CEILING, Proportion, at_chance, share_right

BUDGET = 600.0  # seconds that measuring all heads may take where locate.exact is not set


def look_at_base(subject: Subject, questions: QuestionSet, options: Locate, ledger: Ledger) -> tuple[Proportion, float | None]:
    """(the base's accuracy on the questions, that of guessing; None where there are no choices to guess among). Says so where
    no head could be located by them, or no gain could show."""
    measured = Exact(subject, questions, ablation=options.ablation, ledger=ledger)
    measured.measure([], layers=False)
    accuracy = share_right(measured.correct["base", None])
    chances = [question.chance for question in questions.questions if isinstance(question, Question)]
    chance = float(np.mean(chances)) if chances else None
    probe = probe_in_words(questions.name, questions.options)
    if chance is not None and at_chance(accuracy, chance):
        few = accuracy.accuracy > 2 * chance  # the accuracy may be fine, and only its interval is wide
        easier = "choose a probe that the base can do in part (fewer pairs, say)"
        advice = "ask more questions (locate.examples)" if few else easier
        say(
            f"warning: the base is {'not clearly above' if few else 'at'} chance on {probe}: accuracy {accuracy}, chance "
            f"{chance:.3f}. Heads that are located by it mean nothing, and no gain will count; {advice}"
        )
    elif accuracy.accuracy >= CEILING:
        say(
            f"note: the base is nearly perfect on {probe}: accuracy {accuracy}. A gain cannot show there; choose a harder "
            "probe (more pairs, say)"
        )
    return accuracy, chance


def with_exactness(
    options: Locate, subject: Subject, sets: Sequence[QuestionSet], kept: Path | None = None
) -> Locate:  # fmt: skip
    """The options with `exact` decided, where they leave it open: all heads are measured exactly if there is no other way, or
    if that takes at most BUDGET seconds by the time of one forward of this model. Says what is done. All processes get the same
    answer.

    sets: the questions of the ranking and of its repetitions. kept: the folder of what is measured. The decision is kept there,
    too: an interrupted search does not decide anew by a clock.
    """
    if options.exact is not None:
        return options
    exact = not subject.graftable or processes.on_main(partial(_affordable, options, subject, sets, kept))
    return options.model_copy(update={"exact": float(exact)})


def exactness(options: Locate, subject: Subject, sets: Sequence[QuestionSet], pace: Pace) -> float:
    """The share of the heads that will be measured exactly, by the pace of a forward; says nothing."""
    if options.exact is not None:
        return options.exact
    return float(not subject.graftable or _scan_seconds(options, subject, sets, pace) <= BUDGET)


def _scan_seconds(options: Locate, subject: Subject, sets: Sequence[QuestionSet], pace: Pace) -> float:
    """The seconds of an exact scan."""
    each, share = counted(sets, options.model_copy(update={"exact": True}), subject)
    return pace.time(batch_of(sets) * each.scan(share)) / processes.state().num_processes


def _affordable(options: Locate, subject: Subject, sets: Sequence[QuestionSet], kept: Path | None) -> bool:
    settle(subject.model)
    ids, _ = padded(sets[0].groups[0][1].rows, subject.model.device)
    with busy("timing a forward"):
        pace = forward_pace(subject.model, ids)
    seconds = _scan_seconds(options, subject, sets, pace)
    affordable = exact = seconds <= BUDGET
    if kept is not None:
        exact = _decided(kept / "exact.json", options, subject.conditions.model_dump(mode="json"), exact)
    heads, takes = f"{len(subject.anatomy.coordinates[0]):,} heads", duration(seconds * pace.slowed)
    if exact:
        say(f"measuring {heads} exactly, each ablated and spliced: about {takes}")
    elif affordable:
        say("ranking by attribution alone, as this search began; locate.exact=true measures all heads")
    else:
        say(
            f"ranking by attribution alone: measuring {heads} exactly would take about {takes}, more than {duration(BUDGET)}. "
            "locate.exact=true measures all of them, locate.exact=0.05 the leading 5%"
        )
    return exact


def _decided(path: Path, options: Locate, conditions: dict[str, Any], exact: bool) -> bool:
    """The decision in a file, if it was made for the same model and options; else this one, which is written there."""
    key = {"options": options.model_dump(mode="json"), "conditions": conditions}
    earlier = parse_json(read_text(path), str(path)) if path.exists() else None
    if (
        isinstance(earlier, dict)
        and {name: earlier.get(name) for name in key} == key
        and isinstance(earlier.get("exact"), bool)
    ):
        return earlier["exact"]
    write_text(path, json.dumps({**key, "exact": exact}))
    return exact
