"""What a search runs: counted before, from its questions, and the same in whole forwards of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from surgery.locating.prefilter import deciding
from surgery.locating.questions import QuestionSet
from surgery.locating.roles import EXAMPLES
from surgery.locating.search import LEADING, measured_at_most
from surgery.locating.subject import Subject
from surgery.models.pace import Work
from surgery.records.recipe import Locate

# In forwards of the same batch, measured on the built-in Mambas and at mamba2-130m's shape (CPU, float32): layer by layer,
# beside its variants.
WALK = 3.0


@dataclass(frozen=True)
class PassCounts:
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

    def scan(self, share: float) -> float:
        """What ablating and splicing costs, and the base, in forwards of a batch. share: of all layers, those that a variant
        computes."""
        return self.base + WALK * self.walks + share * self.variants


def passes(sets: Sequence[QuestionSet], options: Locate, heads: int, layers: int, graftable: bool = True) -> PassCounts:
    """The passes of a search, in a model of so many heads and layers. options: with `exact` decided."""
    first, *others = (len(questions.groups) for questions in sets)
    shown = min(EXAMPLES, len(sets[0].questions))
    starts = deciding(sets[0].groups) if graftable else 0
    slopes = first - starts + sum(others) if graftable else 0
    whole, kinds = layers if options.layers else 0, 2 if graftable else 1
    if not options.exact:
        return PassCounts(first + first + sum(others), starts, slopes, 0, 0, shown, False)
    if options.exact == 1:
        variants = first * kinds * (heads + whole) + sum(others) * heads
        return PassCounts(first, starts, slopes, first + sum(others), variants, shown, False)
    chosen = measured_at_most(options.exact, heads)
    best = min(LEADING, chosen) if graftable else 0
    # The leading heads of the spliced are ablated in a walk of their own; without grafts, whole layers are.
    variants = first * (chosen + best + (kinds * whole if graftable else layers)) + sum(others) * 2 * chosen
    return PassCounts(first, starts, slopes, 2 * first + 2 * sum(others), variants, shown, True)


def counted(sets: Sequence[QuestionSet], options: Locate, subject: Subject) -> tuple[PassCounts, float]:
    """(the passes, what share of all layers a variant computes): those from its own layer on."""
    anatomy = subject.anatomy
    depth, layers = len(anatomy.blocks), anatomy.layers()
    each = passes(sets, options, len(anatomy.coordinates[0]), len(layers), subject.graftable)
    shares = [((depth - layer) / depth, anatomy.heads(layer)) for layer in layers]
    return each, sum(share * heads for share, heads in shares) / sum(heads for _, heads in shares)


def batch_of(sets: Sequence[QuestionSet]) -> Work:
    """An average batch, with the tokens of the largest."""
    whole = Work.of((len(batch.rows), max(map(len, batch.rows))) for questions in sets for _, batch in questions.groups)
    return whole * (1 / whole.calls)
