"""The heads that would bring answers back if they chose the right summary (more/oracles.py).

A ranking tells what a graft gains before it is trained. A head whose scores do not choose yet gains nothing then, though it may
carry the answer as soon as it is told where to look, as hints do. So here heads are found by what a perfect choice would save,
on questions that no head was ranked by.
"""

from collections.abc import Sequence

from surgery.choosing.task import ChoiceTask, Most, counts, most_chosen
from surgery.errors import UserError
from surgery.locating.ledger import Ledger
from surgery.locating.planning import plan
from surgery.locating.ranking import Ranking
from surgery.locating.walk import fully_gated
from surgery.more.oracles import TRIED, OracleHead, Oracles, plan_at
from surgery.records.plan import Plan
from surgery.records.recipe import PlanOptions
from surgery.runtime.progress import say


def choose(task: ChoiceTask) -> Plan:
    """The plan of `plan.heads` heads with which a perfect choice saves most loss, each with the sign with which it carries the
    answer and the place at which it reads it. Where heads is auto, they are added while one saves `plan.auto.least_gain` nats.

    All heads share the largest gate within the bounds of plan.auto, untrained and after a few steps of tuning; fewer heads are
    tried as well. Raises UserError where no head saves anything, NoPlan where no plan is within the bounds."""
    options, subject = task.options, task.subject
    ledger = Ledger(task.kept, "choice", subject.conditions.model_dump() if task.kept is not None else None, task.batch_size)
    oracles = Oracles(fully_gated(subject), task.questions, task.batch_size, ledger=ledger)
    worth = options.auto.least_gain if options.grows else 0.0
    carried = oracles.carriers(options.counted, candidates=_tried(options), worth=worth)
    if not carried:
        nowhere = f"at no head does a perfect choice save {f'{worth:g} nats' if worth else 'anything'}"
        raise UserError(f"plan.by=choice: {nowhere}; leave it out, or locate with another probe")
    for number, (carrier, outcome) in enumerate(carried, 1):
        right = f"{outcome.correct.mean():.3f} right, {outcome.loss.mean():.3f} nats"
        say(f"plan: head {number}, a perfect choice at {carrier} too: {right}")
    carriers = [carrier for carrier, _ in carried]
    if not task.measuring.skills:
        return _plan(task.ranking, options, carriers, task.seed)
    plans = [
        _plan(task.ranking, options.model_copy(update={"blend": each}), carriers[:count], task.seed)
        for count in counts(len(carriers))
        for each in task.gates
    ]
    return task.decided(plans)


def most(options: PlanOptions, heads: int, bounded: bool) -> Most:
    """The heads by themselves and then together, of questions alone; then plans within the bounds."""
    tried = min(_tried(options), heads)
    asked = 1 + TRIED * tried + sum(tried - number for number in range(min(options.counted, tried)))
    return most_chosen(options, heads, bounded)._replace(asked=asked)


def _tried(options: PlanOptions) -> int:
    """How many heads are tried by themselves."""
    return options.counted + options.auto.candidates


def _plan(ranking: Ranking, options: PlanOptions, carriers: Sequence[OracleHead], seed: int) -> Plan:
    """The plan of some heads, each with the sign and the place with which it carries the answer."""
    chosen = plan(ranking, **options.given() | {"heads": 1, "sites": tuple(carrier.site for carrier in carriers)}, seed=seed)
    perfect = plan_at(carriers)
    own = perfect.starts
    # Sharpness that was found for the other sign says nothing.
    starts = {head: start if start.sign == own[head].sign else own[head] for head, start in chosen.starts.items()}
    return chosen.model_copy(update={"starts": own | starts, "places": perfect.places})
