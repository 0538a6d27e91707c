"""What is a head also for? What ablating it, and splicing it, does to the base's other skills.

Heads are measured on each skill as they are on the ranking's probe, with the same grafts, and on fewer questions: all skills
together take no more tokens than the probe does, so that locating costs at most twice as much.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from surgery.locating.estimates import estimated, everywhere
from surgery.locating.heads import SCORES, Heads
from surgery.locating.prefilter import Prefilter
from surgery.locating.questions import QuestionSet
from surgery.locating.search import Search, of_heads
from surgery.locating.stability import ScoreColumn
from surgery.locating.subject import Subject
from surgery.models.anatomy import Anatomy
from surgery.probes.encoded import Asked
from surgery.probes.perplexity import TextWindows
from surgery.probes.question import Passage, Question
from surgery.probes.scoring import batches
from surgery.probes.skills import BOUND, BOUND_OF_LOSS, names_of, skill_questions, skills_of
from surgery.records.recipe import Data, Locate
from surgery.records.record import Record
from surgery.records.site import Site, SiteText
from surgery.statistics import LEVEL, Intervals, Proportion, share_right

TEXT, WINDOW = "text", 64  # running text as a skill, in rows of so many tokens
SEED = 60_013  # added to the ranking's: no other questions have it
FEWEST, KEPT = 8, 1_000  # questions about a skill; heads of a model in which none was measured exactly


class SkillScores(Record):
    """name: of the skill. probe: what was asked (name, options, examples). base_accuracy: of the base; chance: that of
    guessing; both None for text. serving: heads whose ablation costs the skill more than BOUND (of text: BOUND_OF_LOSS);
    at_risk: heads at which an untrained graft does. Both stand on intervals that are corrected for the number of heads.
    heads: the scores of those that were measured exactly, or of the leading ones by attribution."""

    name: str
    probe: dict[str, Any]
    base_accuracy: Proportion | None
    chance: float | None
    serving: tuple[SiteText, ...] = ()
    at_risk: tuple[SiteText, ...] = ()
    heads: Heads


def skill_sets(subject: Subject, data: Data, options: Locate, first: QuestionSet, *, seed: int) -> list[QuestionSet]:
    """The questions about every skill but the ranking's probe, and rows of text, where data.train_text is one plain text.
    first: the questions that rank the heads."""
    skills = skills_of(data, {options.probe})
    if not skills:
        return []
    tokenizer, share = subject.tokenizer, tokens_of(first) / (len(skills) + 1)
    sets = []
    for name, skill in zip(names_of(skills), skills, strict=True):

        def drawn(n: int, skill: Any = skill) -> Sequence[Asked]:
            return skill_questions(skill, tokenizer, data, n, seed + SEED)

        questions = _affordable(drawn, subject, options, share)
        groups = list(batches(tokenizer, questions, options.batch_size))
        sets.append(QuestionSet(name, {"probe": skill.probe, **skill.options}, seed, questions, groups, first.reference))
    if (text := _text(subject, data, int(share // WINDOW), options, first)) is not None:
        sets.append(text)
    return sets


def tokens_of(questions: QuestionSet) -> int:
    """How many tokens go through the model for each head."""
    return sum(len(row) for _, encoded in questions.groups for row in encoded.rows)


def _affordable(drawn: Any, subject: Subject, options: Locate, tokens: float) -> Sequence[Asked]:
    """So many questions as take that many tokens, at most `options.examples` and at least FEWEST."""
    sample = drawn(FEWEST)
    each = sum(len(row) for _, encoded in batches(subject.tokenizer, sample, FEWEST) for row in encoded.rows) / len(sample)
    return drawn(max(FEWEST, min(options.examples, int(tokens // each))))


def _text(subject: Subject, data: Data, rows: int, options: Locate, first: QuestionSet) -> QuestionSet | None:
    """Rows of the text that tuning sees."""
    source = data.train_text[0]
    plain = source.source == "world" or source.source.endswith((".txt", ".md"))
    if len(data.train_text) > 1 or not plain or rows < 2:
        return None
    count = min(rows, options.examples)
    ids = TextWindows(source.source, count, WINDOW).token_windows(subject.tokenizer, first.seed + SEED).tolist()
    passages = [Passage(tuple(row), tuple((i, 0) for i in range(1, len(row))), 1 / (len(row) - 1)) for row in ids]
    groups = list(batches(subject.tokenizer, passages, options.batch_size))
    return QuestionSet(TEXT, {"tokens": WINDOW}, first.seed, passages, groups, first.reference)


def slopes(prefilter: Prefilter, questions: QuestionSet, anatomy: Anatomy) -> Intervals:
    """The attribution of all heads on one skill. To be taken before anything is measured exactly: an offloaded model may hold
    weights without gradients afterwards."""
    return estimated("attribution", ScoreColumn(of_heads(prefilter.attributions(questions.groups), anatomy)))


def skill_scores(
    search: Search, questions: QuestionSet, heads: Sequence[Site], ranked: Heads, slope: Intervals | None
) -> SkillScores:  # fmt: skip
    """What the heads do to one skill. heads: those to be measured exactly. ranked: the ranking's, in the model's order. slope:
    their attribution, if there is one."""
    anatomy, exact = search.subject.anatomy, search.exact(questions)
    exact.measure(heads, layers=False)
    columns = (
        {name: ScoreColumn(values, anatomy.numbers(heads)) for name, values in exact.effects(heads).items()} if heads else {}
    )
    count = len(ranked)
    estimates = {
        name: everywhere(estimated(name, columns[name]), columns[name].at, count) for name in SCORES if name in columns
    }
    estimates |= {} if slope is None else {"attribution": slope}
    estimates = {name: estimate for name, estimate in estimates.items() if estimate.n.any()}
    nothing = np.zeros(count, dtype=np.uint8)
    whole = Heads(ranked.layer, ranked.head, ranked.kind, nothing, ranked.sign, ranked.tau, estimates)
    kept = anatomy.numbers(heads) if heads else whole.order()[:KEPT]
    text = questions.name == TEXT
    chances = [each.chance for each in questions.questions if isinstance(each, Question)]
    of_ablation, of_splicing = ("ablation_loss", "splice_loss") if text else ("ablation_drop", "splice_gain")
    bound = BOUND_OF_LOSS if text else BOUND
    serving = _costing(columns.get(of_ablation), of_ablation, 1, count, bound)
    at_risk = _costing(columns.get(of_splicing), of_splicing, -1, count, bound)
    return SkillScores(
        name=questions.name, probe={**questions.options, "examples": len(questions.questions)},
        base_accuracy=None if text else share_right(exact.correct["base", None]),
        chance=float(np.mean(chances)) if chances else None,
        serving=tuple(map(whole.site, serving)), at_risk=tuple(map(whole.site, at_risk)), heads=whole.take(kept),
    )  # fmt: skip


def _costing(column: ScoreColumn | None, name: str, sign: int, count: int, bound: float) -> list[int]:
    """The numbers of the heads, of `count`, that cost more than the bound, by an interval that is corrected for their number.
    sign: with which the score is a cost. column: None where it was not measured."""
    if column is None:
        return []
    part = everywhere(estimated(name, column, LEVEL / count), column.at, count)
    least = part.low if sign > 0 else -part.high
    return np.flatnonzero((sign * part.value > bound) & (least > 0)).tolist()
