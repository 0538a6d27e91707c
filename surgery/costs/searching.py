"""What a search costs beside an exact scan (locating/passes.py): attribution, and the questions about other skills."""

from collections.abc import Sequence

from surgery.locating.attribution import STARTS, attribute_starts
from surgery.locating.attribution_memory import parted
from surgery.locating.passes import PassCounts
from surgery.locating.questions import QuestionSet
from surgery.locating.search import measured_at_most
from surgery.locating.subject import Subject
from surgery.locating.walk import fully_gated
from surgery.models.pace import Pace, Work
from surgery.probes.encoded import Encoded
from surgery.records.recipe import Locate
from surgery.runtime.timing import Stopwatch

MATRICES = 2.0  # forwards of a batch, for the matrices of one question: measured as WALK is
FEW = 2  # rows by which attribution is timed


def forwards(counts: PassCounts, share: float, rows: float, slope: float = 0.0, start: float = 0.0) -> float:
    """All passes, in forwards of a batch of so many rows. share: as PassCounts.scan takes it. slope, start: as
    attribution_costs has them."""
    backward = (counts.starts + counts.slopes) * slope + counts.starts * (len(STARTS) - 1) * start
    return counts.scan(share) + backward + MATRICES * counts.matrices / rows


def attribution_costs(subject: Subject, encoded: Encoded, forward: Pace) -> tuple[float, float]:
    """(a forward and its backward, with the attention of all heads by one start; the same attention by one more start), in
    forwards of the same rows. Timed on a few rows: of channels, attention costs several forwards."""
    gated, few = fully_gated(subject), parted(encoded, FEW)[0]
    times = []
    for starts in (STARTS[:1], STARTS[:1], STARTS[:3]):  # the first is not counted: it finds nothing ready
        watch = Stopwatch(subject.model.device)
        attribute_starts(gated, few, starts)
        times.append(watch.read()[0])
    rows = [len(row) for row in few.rows]
    one = max(1e-9, forward.time(Work.of([(len(rows), max(rows))])))
    return times[1] / one, max(0.0, times[2] - times[1]) / 2 / one


def skill_passes(sets: Sequence[QuestionSet], options: Locate, heads: int, graftable: bool = True) -> PassCounts:
    """The passes of a search on other skills, after those of its own questions. options, heads: as for passes."""
    batches = sum(len(questions.groups) for questions in sets)
    slopes = batches if graftable else 0
    if not options.exact:
        return PassCounts(batches, 0, slopes, 0, 0, 0, False)
    chosen = measured_at_most(options.exact, heads)
    return PassCounts(0, 0, slopes, batches, batches * chosen * (2 if graftable else 1), 0, options.exact != 1)
