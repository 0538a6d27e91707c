"""The plan of a ranking: the leading heads, and null keys that are set on text."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.statistics import difference
from surgery.planning.calibrate import calibrate, fit_queries
from surgery.probes import make_probe, training_options
from surgery.probes.encoded import encode
from surgery.probes.question import Question
from surgery.probes.scoring import answer
from surgery.records.plan import Plan, Start
from surgery.records.ranking import HeadScore, Ranking
from surgery.records.recipe import Data, PlanOptions
from surgery.records.site import Site, merge_sites
from surgery.runtime.progress import say
from surgery.splicing.splice import measuring, splice
from surgery.tuning.examples import data_skills
from surgery.tuning.text import check_known, open_text, text_rows

ROWS, TOKENS = 64, 256  # of text on which null keys are set


def choose(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    ranking: Ranking,
    options: PlanOptions | None = None,
    data: Data | None = None,
    *,
    seed: int = 0,
    questions: Sequence[Question] = (),
) -> Plan:
    """Which sites become attention, and how it starts.

    The leading units of the ranking, or options.sites; for heads with null keys such that the grafts act on options.share of
    data.train_text. questions: for options.heads "auto" and for options.keep_skills, ones that the ranking has not seen. Raises
    UserError for sites in layers that the ranking does not have, and for a model without heads that attention could help.
    """
    options, data = options or PlanOptions(), data or Data()
    brought = {entry["layer"] for entry in getattr(model.config, "grafts", None) or ()}
    units = [each for each in ranking.heads if each.kind == "ssm" and each.site.layer not in brought]
    if not units:
        raise UserError("the model has no SSM head that could become attention")
    if ranking.accuracy.low <= ranking.chance:
        say("the base answers these questions no better than chance, so the ranking does not say which heads retrieve")
    if options.kind == "layer":
        layers = dict.fromkeys(each.site.layer for each in units)  # whose heads lead the ranking
        return Plan(
            kind="layer",
            sites=options.sites or tuple(Site(layer) for layer in list(layers)[: options.layers]),
            width=options.width,
            donor=options.donor,
            donor_layers=options.donor_layers,
            seed=seed,
        )
    with measuring([model]):
        starts = {name: each.start for each in units for name in each.site.head_names}
        if options.sites is not None:
            known = {each.site.layer for each in units}
            if strays := [str(site) for site in options.sites if site.layer not in known]:
                raise UserError(f"plan.sites: the ranking has no SSM head in {strays[0]}")
            return make_plan(model, tokenizer, options.sites, starts, options, data, seed, questions=questions)
        if options.heads != "auto":
            if options.heads > len(units):
                say(f"plan.heads={options.heads}: the ranking has only {len(units)}; all are taken")
            if units[0].slope <= 0:
                say("no head's attribution is positive: attention would not help on these questions; the leading heads stay")
            sites = [each.site for each in units[: options.heads]]
            return make_plan(model, tokenizer, sites, starts, options, data, seed, questions=questions)
        if not questions:
            raise UserError("plan.heads=auto needs questions that the ranking has not seen; give plan.heads a number")
        return grow_plan(model, tokenizer, units, starts, options, data, seed, questions)


def make_plan(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    sites: Sequence[Site],
    starts: dict[str, Start],
    options: PlanOptions,
    data: Data,
    seed: int,
    rows: Tensor | None = None,
    questions: Sequence[Question] = (),
) -> Plan:
    """A plan of head grafts at these sites, with null keys unless options.share is None. rows: what read_plain_text gave
    before, for one who makes several plans. questions: for options.keep_skills."""
    merged = merge_sites(sites)
    heads = {name for site in merged for name in site.head_names}
    plan = Plan(
        sites=merged,
        starts={name: start for name, start in starts.items() if name in heads},
        gate=options.gate,
        closed_below=options.closed_below if options.share is not None else 0.0,
        width=options.width,
        seed=seed,
    )
    if options.share is None:
        return plan
    rows = read_plain_text(tokenizer, data, ROWS, seed) if rows is None else rows
    plan = calibrate(model, plan, rows, options.share)
    if not options.keep_skills:
        return plan
    kept = [make_probe(name, tokenizer, **training_options(name, given)) for name, given in data_skills(data)]
    if not (kept and questions):
        raise UserError("plan.keep_skills needs other skills (data.skills), and questions that the ranking has not seen")
    skills = [question for probe in kept for question in probe.questions(len(questions), seed)]
    return fit_queries(model, plan, encode(tokenizer, questions), encode(tokenizer, skills), rows)


def read_plain_text(tokenizer: PreTrainedTokenizerBase, data: Data, rows: int, seed: int) -> Tensor:
    """(rows, TOKENS) ids of data.train_text, on which null keys are set. Raises UserError for text that cannot be read, or that
    the model does not know."""
    check_known(data.train_text, tokenizer)
    ids, _ = text_rows(open_text(data.train_text, data.column), tokenizer, TOKENS, range(rows), seed)
    return ids


def grow_plan(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    units: Sequence[HeadScore],
    starts: dict[str, Start],
    options: PlanOptions,
    data: Data,
    seed: int,
    questions: Sequence[Question],
) -> Plan:
    """Add the leading units one by one, untrained, while the next one saves options.least_gain nats a question or answers more
    of them, beyond chance: in doubt one more, which costs its cache. One unit that does neither, or with which fewer are
    answered, is passed over: the one behind it may still help. Of the first it is only asked that it does not answer fewer,
    beyond chance: a slope says what a little attention saves, and in the place of a head it may lose much. A larger loss alone
    is no harm: an untrained graft can find the right record and still be too sure of wrong ones, which tuning mends. Where all
    answer fewer, the plan is the leading one."""
    encoded = encode(tokenizer, questions)
    rows = None if options.share is None else read_plain_text(tokenizer, data, ROWS, seed)
    best, passed = answer(model, tokenizer, encoded, what="base"), 0
    plan: Plan | None = None
    leading: Plan | None = None
    for unit in units[: options.max_heads + 1]:
        sites = [*(plan.sites if plan else ()), unit.site]
        if plan is not None and sum(len(site.heads) for site in plan.sites) >= options.max_heads * len(unit.site.heads):
            say(f"plan.max_heads={options.max_heads} is reached: {unit.site} was not tried")
            break
        tried = make_plan(model, tokenizer, sites, starts, options, data, seed, rows, questions)
        found = answer(splice(model, tried).eval(), tokenizer, encoded, what=str(unit.site))
        saved, more = difference(found.loss, best.loss), difference(best.correct, found.correct)
        helps = more.low > 0 or (saved.mean >= options.least_gain and more.high >= 0)
        leading = leading or tried
        taken = helps if plan else more.high >= 0
        why = "answers more" if more.low > 0 else "saves enough" if helps else "shows no harm"
        say(
            f"{unit.site}: saves {saved.mean:+.3f} nats a question [{saved.low:+.3f}, {saved.high:+.3f}], accuracy "
            f"{more.mean:+.3f}, untrained: {f'taken, it {why}' if taken else 'passed over'}"
        )
        if taken:
            plan, best = tried, found
        elif plan:
            passed += 1
            if passed > 1:
                break
    if plan is None:
        assert leading is not None  # there are units
        plan = leading
        say(f"fewer are answered with each leading head, untrained; the plan takes {plan.sites[0]}. See also locate.exact=1")
    return plan
