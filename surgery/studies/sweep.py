"""Retrieval against dictionary size, with and without given heads (arXiv 2504.18574, the KV sweep).

The more there is to choose from, the more a head that aggregates is missed. As many heads drawn at random are the control.
"""

import random
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from surgery.errors import UserError
from surgery.locating.subject import Subject
from surgery.locating.substitution import ablate_heads, skip_layers
from surgery.probes.kv import KVRetrieval
from surgery.probes.scoring import answer
from surgery.records.record import Record
from surgery.records.site import Site, SiteText
from surgery.runtime.progress import Track
from surgery.statistics import Estimate, Proportion, difference, proportion
from surgery.studies.prune import heads_of

CONTROL = "as many heads at random"


class Curve(Record):
    """A model without the heads of `silent`: for every number of pairs its accuracy, and what it lost against the whole model
    on the same dictionaries."""

    what: str
    silent: tuple[SiteText, ...] = ()
    accuracy: dict[int, Proportion]
    drop: dict[int, Estimate]


def kv_sweep(
    subject: Subject,
    sizes: Sequence[int],
    groups: Mapping[str, Collection[Site]],
    *,
    layers: int | None = None,
    controls: int = 2,
    examples: int = 256,
    batch_size: int = 64,
    seed: int = 0,
) -> tuple[Curve, ...]:
    """The whole model; the model without each of the named groups of heads; and, as a control, `controls` times without as many
    heads as the largest group has, drawn from all layers alike, but from no group. layers: measure in a model of the first so
    many (in the minimal model no later layer can stand in for what is lost). Raises UserError for heads that it lacks."""
    if examples < 2:
        raise UserError("a sweep needs at least 2 examples")
    if not groups or not all(groups.values()):
        raise UserError("a sweep needs the heads that are to be ablated")
    anatomy = subject.anatomy
    layers = len(anatomy.blocks) if layers is None else layers
    anatomy.check([Site(layers - 1), *(site for heads in groups.values() for site in heads)])
    silent = {"whole": [], **{what: sorted(heads_of(heads)) for what, heads in groups.items()}}
    taken = {head for heads in silent.values() for head in heads}
    if stray := next((head for head in sorted(taken) if head.layer >= layers), None):
        raise UserError(f"{stray} is not among the first {layers} layers")
    free = [site for site in anatomy.sites() if site not in taken and site.layer < layers]
    most = max(map(len, silent.values()))
    if len(free) < most:
        raise UserError(f"the model has {len(free)} other heads; a control needs {most}")
    for control in range(controls):
        drawn = random.Random(f"sweep {seed} {control}").sample(free, most)
        silent[CONTROL + (f" ({control + 1})" if controls > 1 else "")] = sorted(drawn)

    questions = {size: KVRetrieval(size).questions(examples, seed) for size in sizes}
    curves: list[Curve] = []
    base: dict[int, np.ndarray] = {}
    for what, heads in Track(list(silent.items()), "sweep"):
        accuracy, drop = {}, {}
        with skip_layers(subject, range(layers, len(anatomy.blocks))), ablate_heads(anatomy, heads):
            for size in sizes:
                correct = answer(subject.model, subject.tokenizer, questions[size], batch_size).correct
                whole_correct = base.setdefault(size, correct)
                accuracy[size] = proportion(correct)
                drop[size] = difference(correct, whole_correct)
        curves.append(Curve(what=what, silent=tuple(heads), accuracy=accuracy, drop=drop))
    return tuple(curves)
