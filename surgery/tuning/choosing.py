"""plan.by: choice. Heads that would bring answers back if they chose the right summary (locating/oracles.py).

A ranking tells what a graft gains before it is trained. A head whose scores do not choose yet gains nothing then, though it may
carry the answer as soon as it is told where to look, as hints do. So here heads are found by what a perfect choice would save,
on questions that no head was ranked by.
"""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.loading.opened import Checkpoint
from surgery.locating.ledger import Ledger
from surgery.locating.oracles import TRIED, Carrier, Oracles, plan_at
from surgery.locating.planning import plan
from surgery.locating.ranking import Ranking
from surgery.locating.subject import Subject
from surgery.locating.walk import fully_gated
from surgery.probes.skills import skills_of
from surgery.records.plan import Plan
from surgery.records.recipe import Data, PlanOptions, Tune
from surgery.runtime.progress import say
from surgery.tuning.bounded import Bounds, Measuring, decided, growth_of
from surgery.tuning.growing import fresh_questions, gate


def tried(options: PlanOptions) -> int:
    """How many heads are tried by themselves."""
    return options.counted + options.auto.candidates


def most_measured(options: PlanOptions) -> int:
    """How many sets of heads are measured at most, the base included."""
    return 1 + TRIED * tried(options) + sum(tried(options) - number for number in range(options.counted))


def most_bounded(options: PlanOptions) -> int:
    """How many plans are then measured at most where skills bound them: the base, each number of heads under each gate, and the
    finalists after a few steps."""
    gates = len(options.auto.gates) if options.blend is None else 1
    return 1 + len(_counts(options.counted)) * gates + options.auto.finalists


def by_choice(
    base: PreTrainedModel | Checkpoint, ranking: Ranking, options: PlanOptions, *, data: Data | None = None,
    tuning: Tune | None = None, batch_size: int = 32, seed: int | None = None, kept: Path | None = None,
) -> Plan:  # fmt: skip
    """The plan of `options.heads` heads with which a perfect choice saves most loss, each with the sign with which it carries
    the answer and the place at which it reads it. Where heads is auto, they are added while one saves
    `options.auto.least_gain` nats.

    All heads share the largest gate within the bounds of plan.auto, untrained and after a few steps of tuning; fewer heads are
    tried as well.

    base: what was ranked. data, tuning: as for growing.grow. batch_size: questions in a forward. seed: the ranking's, unless
    given. kept: a folder for what is measured; what is there already is not measured again. Raises UserError where no head
    saves anything, NoPlan where no plan is within the bounds."""
    subject = Subject.of(base, verb="plan")
    seed = ranking.provenance.seed if seed is None else seed
    questions = fresh_questions(subject.tokenizer, ranking, options.auto.examples, seed)
    ledger = Ledger(kept, "choice", subject.conditions.model_dump() if kept is not None else None, batch_size)
    oracles = Oracles(fully_gated(subject), questions, batch_size, ledger=ledger)
    worth = options.auto.least_gain if options.grows else 0.0
    found = oracles.carriers(options.counted, candidates=tried(options), worth=worth)
    if not found:
        nowhere = f"at no head does a perfect choice save {f'{worth:g} nats' if worth else 'anything'}"
        raise UserError(f"plan.by=choice: {nowhere}; leave it out, or locate with another probe")
    for number, (carrier, outcome) in enumerate(found, 1):
        right = f"{outcome.correct.mean():.3f} right, {outcome.loss.mean():.3f} nats"
        say(f"plan: head {number}, a perfect choice at {carrier} too: {right}")
    carriers = [carrier for carrier, _ in found]
    whole = _plan(ranking, options, carriers, seed)
    data, tuning = data or Data(), tuning or Tune()
    if not skills_of(data, {ranking.probe["name"], *(lesson.probe for lesson in tuning.lessons)}):
        return whole
    measuring = Measuring.of(
        subject, questions, options.auto, data=data, tuning=tuning, taught=ranking.probe["name"], batch_size=batch_size,
        seed=seed, kept=kept,
    )  # fmt: skip
    (before,) = measuring.measure([None], "plan, the base")
    bounds = Bounds(measuring, before, options.auto)
    gates = [options.blend] if options.blend is not None else [gate(each) for each in sorted(options.auto.gates, reverse=True)]
    plans = [
        _plan(ranking, options.model_copy(update={"blend": each}), carriers[:count], seed)
        for count in _counts(len(carriers))
        for each in gates
    ]
    growth = growth_of(ranking.probe, measuring, before)
    return decided(measuring, bounds, plans, growth, by_preference=True)


def _counts(heads: int) -> list[int]:
    """How many of the heads are tried together: all, half, one."""
    return sorted({heads, -(-heads // 2), 1}, reverse=True)


def _plan(ranking: Ranking, options: PlanOptions, carriers: Sequence[Carrier], seed: int) -> Plan:
    """The plan of some heads, each with the sign and the place with which it carries the answer."""
    chosen = plan(ranking, **options.given() | {"heads": 1, "sites": tuple(carrier.site for carrier in carriers)}, seed=seed)
    perfect = plan_at(carriers)
    own = perfect.starts
    # Sharpness that was found for the other sign says nothing.
    starts = {head: start if start.sign == own[head].sign else own[head] for head, start in chosen.starts.items()}
    return chosen.model_copy(update={"starts": own | starts, "places": perfect.places})
