"""Before a search begins: how well does the base do what it is asked, and how long would measuring every head exactly take?"""

import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surgery.locating.exact import Exact
from surgery.locating.ledger import Ledger
from surgery.locating.questions import QuestionSet, described
from surgery.locating.subject import Subject
from surgery.models.answers import settle
from surgery.probes.encoded import padded
from surgery.probes.question import Question
from surgery.records.reading import parse_json
from surgery.records.recipe import Locate
from surgery.records.record import read_text, write_text
from surgery.runtime import processes
from surgery.runtime.progress import busy, duration, say
from surgery.statistics import Proportion, at_chance, share_right

CEILING = 0.98  # an accuracy above which hardly anything is left to gain


def look_at_base(subject: Subject, questions: QuestionSet, options: Locate, ledger: Ledger) -> tuple[Proportion, float | None]:
    """(the base's accuracy on the questions, that of guessing; None where there are no choices to guess among). Says so where
    no head could be located by them."""
    measured = Exact(subject, questions, ablation=options.ablation, ledger=ledger)
    measured.measure([], layers=False)
    accuracy = share_right(measured.correct["base", None])
    chances = [question.chance for question in questions.questions if isinstance(question, Question)]
    chance = float(np.mean(chances)) if chances else None
    probe = described(questions.name, questions.options)
    if chance is not None and at_chance(accuracy, chance):
        few = accuracy.accuracy > 2 * chance  # and only the interval is wide
        easier = "choose a probe that the base can do in part (fewer pairs, say)"
        advice = "ask more questions (locate.examples)" if few else easier
        say(
            f"warning: the base is {'not surely above' if few else 'at'} chance on {probe}: accuracy {accuracy}, chance "
            f"{chance:.3f}. Heads that are located by it mean nothing, and no gain will be called a gain; {advice}"
        )
    elif accuracy.accuracy >= CEILING:
        say(
            f"note: the base is next to perfect on {probe}: accuracy {accuracy}. A gain cannot show there; choose a probe on "
            "which it fails at times (more pairs, say)"
        )
    return accuracy, chance


def with_exactness(
    options: Locate, subject: Subject, sets: Sequence[QuestionSet], kept: Path | None = None
) -> Locate:  # fmt: skip
    """The options with `exact` decided, where they leave it open: heads are measured exactly if `confirm` asks for it, if there
    is no other way, or if that takes at most `budget` seconds by the time of one forward of this model. Says what is done. All
    processes get the same answer.

    sets: the questions of the ranking and of its repetitions. kept: the folder of what is measured. The decision is kept there,
    too: an interrupted search does not decide anew by a clock.
    """
    exact = _exact(options, subject, lambda: processes.on_main(partial(_affordable, options, subject, sets, kept)))
    return options if options.exact is not None else options.model_copy(update={"exact": exact})


def forwards(subject: Subject, sets: Sequence[QuestionSet], layers: bool) -> float:
    """How many forwards of a batch an exact scan costs. Ablating or splicing a head costs the layers from its own on."""
    depth, anatomy = len(subject.anatomy.blocks), subject.anatomy
    shares = {layer: (depth - layer) / depth for layer in anatomy.layers()}
    heads = sum(anatomy.heads(layer) * share for layer, share in shares.items())
    whole = sum(shares.values()) if layers else 0
    first, *others = (len(questions.groups) for questions in sets)
    return first * (1 + 2 * (heads + whole)) + sum(others) * (1 + heads)  # repetitions splice alone


def is_exact(options: Locate, subject: Subject, sets: Sequence[QuestionSet], step: float) -> bool:
    """Whether heads will be measured exactly, where a forward of a batch takes `step` seconds; nothing is said."""
    return _exact(options, subject, lambda: _scan(options, subject, sets, step) <= options.budget)


def _exact(options: Locate, subject: Subject, affordable: Callable[[], bool]) -> bool:
    """What the options say of `exact`, or the model, or else what can be afforded."""
    if options.exact is not None:
        return options.exact
    return options.confirm is not None or not subject.graftable or affordable()


def _scan(options: Locate, subject: Subject, sets: Sequence[QuestionSet], step: float) -> float:
    """The seconds of an exact scan, where a forward of a batch takes `step`."""
    return step * forwards(subject, sets, options.layers) / processes.state().num_processes


def _affordable(options: Locate, subject: Subject, sets: Sequence[QuestionSet], kept: Path | None) -> bool:
    settle(subject.model)
    rows = sets[0].groups[0][1].rows
    with busy("timing the model"):
        step = _seconds(partial(_forward, subject, *padded(rows, subject.model.device)))
    seconds = _scan(options, subject, sets, step)
    affordable = exact = seconds <= options.budget
    if kept is not None:
        exact = _decided(kept / "exact.json", options, subject.conditions.model_dump(mode="json"), exact)
    heads = f"{len(subject.anatomy.places[0]):,} heads"
    if exact:
        say(f"measuring {heads} exactly, each ablated and spliced: about {duration(seconds)}")
    elif affordable:
        say("locating by attribution alone, as this search began; locate.exact=true measures all heads")
    else:
        say(
            f"locating by attribution alone: measuring {heads} exactly would take about {duration(seconds)}, more than "
            f"locate.budget ({duration(options.budget)}). locate.exact=true measures all of them, locate.confirm=0.05 the "
            "leading 5%"
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


@torch.inference_mode()
def _forward(subject: Subject, ids: Tensor, last: Tensor) -> None:
    subject.model(input_ids=ids, use_cache=False, logits_to_keep=last.unique())
    if ids.device.type == "cuda":
        torch.cuda.synchronize(ids.device)


def _seconds(work: Callable[[], None]) -> float:
    """The shorter of two times: the first call also sets up what later ones find ready."""
    best = math.inf
    for _ in range(2):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
