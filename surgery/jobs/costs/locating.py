"""What locating costs: the passes that a search makes, counted from its questions, and the time of one of each."""

import math
from dataclasses import dataclass

from surgery.jobs.costs.sample import Patient, Sample, sampled, total
from surgery.locating.attribution import STARTS, attribute_starts
from surgery.locating.attribution_memory import Activations, Step, activations
from surgery.locating.budget import is_exact
from surgery.locating.exact import Exact
from surgery.locating.locate import ROLE_EXAMPLES, ROLE_HEADS
from surgery.locating.prefilter import deciding
from surgery.locating.questions import QuestionSet, question_set, question_sets
from surgery.locating.roles import masses
from surgery.locating.search import DRAWN, LEADING
from surgery.locating.walk import fully_gated
from surgery.probes.encoded import Encoded
from surgery.records.recipe import Locate
from surgery.records.site import Site
from surgery.runtime.memory import spare


@dataclass(frozen=True)
class Passes:
    """Through the whole model, of one batch each. base: forwards of the base. starts, slopes: forwards with a backward, with
    all starts and with one. walks: layer by layer, for an exact scan. variants: what an exact scan tries in all its walks, each
    of which costs the layers above it. matrices: questions whose mixing matrices are written out. at_most: whether fewer heads
    may be measured than are counted."""

    base: int
    starts: int
    slopes: int
    walks: int
    variants: int
    matrices: int
    at_most: bool


def passes(sets: list[QuestionSet], options: Locate, heads: int, layers: int, graftable: bool = True) -> Passes:
    """The passes of a search, in a model of so many heads and layers. options: with `exact` decided."""
    first, *others = (len(questions.groups) for questions in sets)
    shown = min(ROLE_EXAMPLES, len(sets[0].questions))
    starts = deciding(sets[0].groups) if graftable else 0
    slopes = first - starts + sum(others) if graftable else 0
    whole, kinds = layers if options.layers else 0, 2 if graftable else 1
    if not options.exact:
        return Passes(first + first + sum(others), starts, slopes, 0, 0, shown, False)
    if options.confirm is None:
        variants = first * kinds * (heads + whole) + sum(others) * heads
        return Passes(first, starts, slopes, first + sum(others), variants, shown, False)
    chosen = min(heads, math.ceil(options.confirm * heads) + DRAWN)
    best = min(LEADING, chosen) if graftable else 0
    # The leading heads of the spliced are ablated in a walk of their own; without grafts, whole layers are.
    variants = first * (chosen + best + (kinds * whole if graftable else layers)) + sum(others) * 2 * chosen
    return Passes(first, starts, slopes, 2 * first + 2 * sum(others), variants, shown, True)


@dataclass(frozen=True)
class LocatingCost:
    """The time of each kind of pass, and the whole."""

    passes: Passes
    sample: Sample
    exact: bool


def locating_cost(patient: Patient, options: Locate, seed: int, quick: bool = False) -> LocatingCost:
    """Measured on the first batch of the recipe's own questions. quick: what costs much is tried on fewer questions."""
    device = patient.model.device
    sets = question_sets(patient.tokenizer, options, seed=seed, device=device)
    tried = patient.rows(min(options.batch_size, options.examples))
    if quick:
        tried = min(tried, max(1, options.batch_size // 8))
    few = question_set(
        patient.tokenizer, options, options.model_copy(update={"examples": max(2, tried), "batch_size": tried}),
        seed=seed, device=device,
    )  # fmt: skip
    encoded = few.groups[0][1]
    largest = max((encoded for _, encoded in sets[0].groups), key=lambda batch: len(batch.rows) * max(map(len, batch.rows)))
    factor = len(largest.rows) * max(map(len, largest.rows)) / (len(encoded.rows) * max(map(len, encoded.rows)))

    def base(depth: int) -> Sample:
        alone = _first(few)
        return sampled(lambda: Exact(patient.subject(depth), alone).measure([], layers=False))

    forward = patient.along(base).larger(factor)
    exact = is_exact(options, patient.subject(patient.depth), sets, forward.seconds)
    counted = passes(sets, options.model_copy(update={"exact": exact}), patient.heads * patient.depth, patient.depth)
    parts = [forward * counted.base]
    if counted.slopes + counted.starts:
        step = _step(patient, largest, whole="batch_size" in options.model_fields_set)
        rows = min(len(largest.rows), step.rows or len(largest.rows))
        for number, starts in ((counted.starts, STARTS), (counted.slopes, (None,))):
            if number:

                def attribution(depth: int, starts: tuple = starts) -> Sample:
                    gated = fully_gated(patient.subject(depth))
                    tried = Step(None, step.checkpointed)
                    return sampled(lambda: attribute_starts(gated, encoded, starts, tried), repeat=not quick)

                each = patient.along(attribution)
                parts.append(Sample(each.seconds * factor, each.bytes * factor * rows / len(largest.rows)) * number)
    if counted.walks:
        walk, variant = _exact(patient, _first(few), options)
        parts += [walk.larger(factor) * counted.walks, variant.larger(factor) * counted.variants]
    sites = None if patient.heads * patient.depth <= ROLE_HEADS else LEADING

    def matrices(depth: int) -> Sample:
        subject = patient.subject(depth)
        named = subject.anatomy.sites()
        of = named if sites is None else named[:sites]
        return sampled(lambda: masses(subject, few.questions[:1], of))

    if sites is None or counted.walks:
        parts.append(patient.along(matrices) * counted.matrices)
    return LocatingCost(counted, total(parts), exact)


def _step(patient: Patient, largest: Encoded, whole: bool) -> Step:
    """What attribution will do at a time, from what a token leaves in the layers that are tried."""
    depth = patient.depths[-1]
    kept = activations(fully_gated(patient.subject(depth)), min(largest.rows, key=len))
    times = patient.depth / depth
    kept = Activations(kept.entering * times, kept.all_blocks * times, kept.block)
    return kept.step(largest, spare(patient.model.device), whole=whole)


def _exact(patient: Patient, questions: QuestionSet, options: Locate) -> tuple[Sample, Sample]:
    """(a walk through one batch, a variant in it): from scans of one head and of two in every layer."""

    def scan(depth: int, heads: int) -> Sample:
        subject = patient.subject(depth)
        gated = fully_gated(subject)
        of = [Site(layer, (head,)) for layer in subject.anatomy.layers() for head in range(heads)]
        exact = Exact(subject, questions, gated=gated, ablation="zero")
        return sampled(lambda: exact.measure(of, layers=False))

    more = min(2, patient.heads)

    def variant(depth: int) -> Sample:
        first, both = scan(depth, 1), scan(depth, more)
        each = max(0.0, both.seconds - first.seconds) / (2 * depth) if more > 1 else first.seconds / (3 * depth)
        return Sample(each, both.bytes)

    def walk(depth: int) -> Sample:
        first, each = scan(depth, 1), variants[depth]
        return Sample(max(0.0, first.seconds - 2 * depth * each.seconds), first.bytes)

    variants = {depth: variant(depth) for depth in patient.depths}
    return patient.along(walk), patient.along(variants.__getitem__)


def _first(questions: QuestionSet) -> QuestionSet:
    """The first batch alone, without a reference."""
    chosen, encoded = questions.groups[0]
    return QuestionSet(
        questions.name, questions.options, questions.seed, [questions.questions[i] for i in chosen],
        [(list(range(len(chosen))), encoded)],
    )  # fmt: skip
