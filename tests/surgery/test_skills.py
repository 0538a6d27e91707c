"""No skill is paid for with another: what else a base can do is measured, bounded, held while tuning, and compared."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from surgery.choosing.bounded import Measuring, NoPlan, PlanMeasurement
from surgery.choosing.gain import grow
from surgery.locating.exact import Exact
from surgery.locating.locate import locate
from surgery.locating.planning import plan
from surgery.locating.questions import question_sets
from surgery.locating.ranking import Ranking
from surgery.locating.skill_scores import skill_sets, tokens_of
from surgery.locating.subject import Subject
from surgery.probes.knowledge import Knowledge, Letters
from surgery.probes.skills import keeps, names_of, skill_questions, skills_of
from surgery.records.growth import Candidate, Growth, Saved
from surgery.records.plan import Plan
from surgery.records.recipe import Auto, Data, Lesson, Locate, PlanOptions, Skill, Tune
from surgery.records.site import Site
from surgery.splicing.splice import adopt, splice
from surgery.statistics import mean
from surgery.tuning.batches import Lessons, loaders
from surgery.tuning.distil import Distillation, counted
from surgery.tuning.micro_batches import MicroBatches
from surgery.tuning.skill_batches import skill_loader
from surgery.tuning.trainable import trainable, training
from tests.models import SAME, random_base

LETTERS = (Skill(probe="letters"),)
SHORT = Tune(steps=2, batch_size=2, text_batch_size=2, text_tokens=24, skill_batch_size=6)


def test_which_skills_are_meant():
    assert [skill.probe for skill in skills_of(Data(), {"kv"})] == ["letters", "knowledge"]
    assert [skill.probe for skill in skills_of(Data(), {"letters"})] == ["kv", "knowledge"]
    assert skills_of(Data(skills=[]), {"kv"}) == ()
    named = Data(skills="letters,knowledge").skills
    assert named == Data(skills=["letters", {"probe": "knowledge"}]).skills == (*LETTERS, Skill(probe="knowledge"))
    assert skills_of(Data(skills=["kv"]), {"kv"}) == (Skill(probe="kv"),)  # named, so meant
    assert names_of([*named, Skill(probe="letters", options={"source": "mine.jsonl"})]) == [
        "letters.1",
        "knowledge",
        "letters.2",
    ]


def test_bench_asks_other_questions_about_the_world(tokenizer):
    for probe, kind in (("letters", Letters), ("knowledge", Knowledge)):
        measured = {question.prompt for question in kind().questions(500, seed=10_000)}
        kept = skill_questions(Skill(probe=probe), tokenizer, Data(), 300, 0)
        assert len(kept) == 300
        assert not measured & {question.prompt for question in kept}
        assert kept == skill_questions(Skill(probe=probe), tokenizer, Data(), 300, 0)


@pytest.mark.parametrize("count", [3, 4, 9])
def test_the_facts_of_a_file_are_divided(count, tmp_path, tokenizer):
    path = tmp_path / "facts.jsonl"
    choices = [" a", " b", " c", " d"]
    lines = [json.dumps({"prompt": f"The number {i} is", "answer": choices[i % 4], "choices": choices}) for i in range(count)]
    path.write_text("\n".join(lines))
    whole, tuning, bench = (
        {question.prompt for question in Knowledge(str(path), part).questions(99, seed=0)} for part in (None, "tune", "bench")
    )
    assert len(whole) == count
    assert tuning | bench == whole
    assert (len(tuning), tuning & bench) == ((count // 4, set()) if count >= 4 else (count, whole))
    skill = Skill(probe="knowledge")
    assert {question.prompt for question in skill_questions(skill, tokenizer, Data(facts=str(path)), 99, 0)} == tuning


@given(st.integers(2, 600), st.integers(0, 600), st.integers(0, 600))
def test_a_skill_that_is_kept(n, lost, gained):
    """What is unchanged is kept; what falls by more than the bound is not; and it never helps to lose more."""
    lost, gained = min(lost, n // 2), min(gained, n - n // 2)
    before = np.arange(n) < n // 2
    after = before.copy()
    after[:lost] = False
    after[n // 2 : n // 2 + gained] = True
    assert keeps(before, before, 0.02)
    if (lost - gained) / n > 0.02:
        assert not keeps(before, after, 0.02)
    worse = after.copy()
    worse[:] &= np.arange(n) >= min(lost + 1, n // 2)
    assert keeps(before, after, 0.02) or not keeps(before, worse, 0.02)


# Tuning


def test_the_batches_of_skills(tokenizer):
    def batches(start=0, **changes):
        return list(skill_loader(tokenizer, SHORT.model_copy(update=changes), Data(), 3, start))

    first, second = batches()
    assert len(batches(1)) == 1
    for ours, theirs in zip(second, batches(1)[0], strict=True):
        assert torch.equal(ours, theirs)  # a run that is resumed goes on with the same
    ids, answers = first
    assert ids.shape == answers.shape
    assert len(ids) == 6
    assert not torch.equal(ids, second[0])
    assert (answers.sum(1) == 1).all()  # the small world's answers are single words
    letters = {tokenizer.convert_tokens_to_ids(token) for token in tokenizer.tokenize(" A B C D")}
    for row, (tokens, asked) in enumerate(zip(ids, answers, strict=True)):
        (answer,) = tokens[1:][asked[:-1]].tolist()
        assert (answer in letters) == (row % 2 == 0)  # the skills take turns
    assert batches(skill_weight=0.0) == [None, None]
    assert list(skill_loader(tokenizer, SHORT, Data(skills=[]), 3, 0)) == [None, None]


@pytest.mark.parametrize(("probe", "kind"), [("letters", Letters), ("knowledge", Knowledge)])
def test_lessons_about_facts_ask_what_bench_does_not(probe, kind, tokenizer):
    options = Tune(steps=40, batch_size=4, lessons=(Lesson(probe=probe),))
    prompts = {pieces[0][0] for pieces in Lessons(tokenizer, options, 0)}
    assert len(prompts) > 100
    assert not prompts & {question.prompt for question in kind().questions(500, seed=10_000)}


def spliced(vocabulary: int):
    base = random_base(vocab_size=vocabulary).to(torch.get_default_dtype())
    hybrid = splice(base, Plan(sites=("L1.H1,2",), blend=0.4))
    with torch.no_grad():
        for name, p in hybrid.named_parameters():
            if ".graft." in name:
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return base, hybrid


@pytest.mark.usefixtures("in_float64")
def test_the_loss_on_skills_is_the_divergence_at_the_answers(tokenizer):
    base, hybrid = spliced(len(tokenizer))
    (lesson, *_), (text, *_) = (list(loader) for loader in loaders(tokenizer, SHORT, Data(), 0, 0))
    skills = next(iter(skill_loader(tokenizer, SHORT, Data(), 0, 0)))
    ids, answers = skills
    with training(hybrid, trainable(hybrid, None)) as trained:
        module = Distillation(hybrid, adopt(base), kl_weight=2.0, skill_weight=3.0)
        assert module.first == 1  # what is below the graft is shared
        losses = module(*lesson, text, skills=skills)
        with torch.no_grad():
            teacher = base(input_ids=ids).logits.log_softmax(-1)[answers]
        student = hybrid(input_ids=ids).logits.log_softmax(-1)[answers]
        expected = F.kl_div(student, teacher, log_target=True, reduction="sum") / answers.sum()
        torch.testing.assert_close(losses["skills"], expected, **SAME)
        torch.testing.assert_close(losses["loss"], losses["retrieval"] + 2 * losses["kl"] + 3 * losses["skills"], **SAME)
        ours = torch.autograd.grad(losses["skills"], list(trained.values()), allow_unused=True)
        theirs = torch.autograd.grad(expected, list(trained.values()), allow_unused=True)
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.allclose(one, other, **SAME)
        assert losses["skills"] > 1e-6
        assert "skills" not in Distillation(hybrid, adopt(base), skill_weight=0.0)(*lesson, text, skills=skills)


class OneOfTwo:
    """An accelerator of one of two processes, which knows the counts of the other."""

    def __init__(self, counts):
        self.counts = torch.tensor(counts, dtype=torch.float64)

    def reduce(self, own, _):
        return self.counts.mean(0)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("parts", [1, 4])
def test_two_processes_and_micro_batches_have_the_same_loss(parts, tokenizer):
    """Also where a process, or a part, has fewer questions than others."""
    base, hybrid = spliced(len(tokenizer))
    (lesson, *_), (text, *_) = (list(loader) for loader in loaders(tokenizer, SHORT, Data(), 0, 0))
    few = SHORT.model_copy(update={"skill_batch_size": 3})
    skills = next(iter(skill_loader(tokenizer, few, Data(skills="letters"), 0, 0)))
    with training(hybrid, trainable(hybrid, None)):
        module = Distillation(hybrid, adopt(base), skill_weight=2.0)
        whole = module(*lesson, text, skills=skills)
        halves = [
            tuple(tuple(side[rows] for side in part) for part in (lesson, text, skills)) for rows in (slice(0, 1), slice(1, 3))
        ]
        counts = [counted(each[0][1], each[1], each[2]) for each in halves]
        options = SHORT.model_copy(update={"gradient_accumulation_steps": parts, "batch_size": 4})
        split = [MicroBatches(None, options, Data(), OneOfTwo(counts)).split(None, half) for half in halves]
        assert all(len(each) == parts for each in split)
        losses = [module(*part) for each in split for part in each]
        for name, value in whole.items():
            together = torch.stack([each[name] for each in losses]).sum() / 2
            torch.testing.assert_close(together, value, **SAME)


# Locating


def test_locating_on_skills_takes_at_most_twice_the_tokens(tiny):
    subject = Subject.of(tiny)
    options = Locate(options={"pairs": 16}, examples=24)
    (first,) = question_sets(tiny.tokenizer, options, seed=0, device=torch.device("cpu"))
    five = Data(skills=["letters", "knowledge", {"probe": "mqar", "options": {"pairs": 8}}])
    sets = skill_sets(subject, five, options, first, seed=0)
    assert [each.name for each in sets] == ["letters", "knowledge", "mqar", "text"]
    assert sum(map(tokens_of, sets)) <= tokens_of(first)
    assert all(len(each.questions) >= 4 for each in sets)
    assert not skill_sets(subject, Data(skills=[]), options, first, seed=0)


@pytest.fixture(scope="module")
def ranking(tiny) -> Ranking:
    return locate(tiny, options={"pairs": 8}, examples=16, exact=True, layers=False)


def test_what_heads_do_to_other_skills(tiny, ranking):
    """Each score is what ablating or splicing that head alone does to the same questions."""
    assert [skill.name for skill in ranking.skills] == ["letters", "knowledge", "text"]
    knowledge = ranking.skills[1]
    assert knowledge.base_accuracy.accuracy > 0.9
    assert knowledge.chance < 0.2
    assert len(knowledge.heads) == len(ranking.heads) == 32
    subject, options = Subject.of(tiny), Locate(options={"pairs": 8}, examples=16, layers=False)
    (first,) = question_sets(tiny.tokenizer, options, seed=0, device=torch.device("cpu"))
    questions = skill_sets(subject, Data(), options, first, seed=0)[1]
    alone = Exact(subject, questions)
    alone.measure([Site(2, (3,))], layers=False, kinds=("ablate",))
    expected = alone.effects([Site(2, (3,))])["ablation_loss"].mean()
    score = next(score for score in knowledge.heads if score.site == Site(2, (3,)))
    assert score.ablation_loss.value == pytest.approx(expected, rel=1e-6)
    assert score.splice_gain is not None
    assert score.attribution is not None


def test_a_ranking_with_skills_is_read_as_it_was_written(ranking, tmp_path):
    ranking.write(tmp_path / "ranking.json")
    assert Ranking.read(tmp_path / "ranking.json") == ranking
    without = ranking.model_copy(update={"skills": ()})
    assert "skills" not in json.loads(without.text())


def costly(ranking, name="letters", **sites) -> Ranking:
    """The ranking, some of whose heads are made to serve a skill."""
    skills = tuple(
        skill.model_copy(update={key: tuple(map(Site.parse, value)) for key, value in sites.items()})
        if skill.name == name else skill.model_copy(update={"serving": (), "at_risk": ()})
        for skill in ranking.skills
    )  # fmt: skip
    return ranking.model_copy(update={"skills": skills})


def test_a_plan_names_what_it_puts_at_risk(ranking):
    first, second, third = (str(score.site) for score in ranking.top(3))
    made = costly(ranking, serving=[second], at_risk=[first])
    assert made.also_for(Site.parse(first)) == made.also_for(Site.parse(second)) == ["letters"]
    assert made.also_for(Site.parse(third)) == []
    chosen = plan(made, heads=3)
    assert chosen.at_risk == {"letters": (first,)}
    assert "at_risk" not in plan(made, sites=third).model_dump(mode="json")
    assert Plan.model_validate_json(chosen.model_dump_json()) == chosen
    header, body = made.table(3)
    assert header[-1] == "also for"
    assert [row[-1] for row in body] == ["letters", "letters", ""]


# Planning under bounds


class Made:
    """Measurements that are made up: what each head saves on every question, and which share of another skill it costs, both
    by the gate; steps: what is lost then, in place of that."""

    def __init__(self, saves, costs, after=None, skill="letters", n=256, learned=None):
        self.saves, self.costs, self.after, self.skill, self.n = saves, costs, after, skill, n
        self.learned = saves if learned is None else learned  # what each head saves after the steps
        self.seen = []

    def __call__(self, _, chosen, steps=0):
        self.seen.append((chosen, steps))
        heads = [str(head) for site in chosen.sites for head in site.each()] if chosen else []
        gate = 1.0 if chosen is None or chosen.blend is None else chosen.blend
        noise = np.random.default_rng(0).normal(size=40)
        gains = sum((self.learned if steps else self.saves).get(head, 0.0) for head in heads)
        loss = 5 + noise - (1 + steps / 25) * gains * gate**0.5 * (1 + 0.1 * noise)
        costs = self.after if steps and self.after is not None else self.costs
        lost = round(self.n * min(0.9, sum(costs.get(head, 0.0) for head in heads) * gate**2))
        right = np.arange(self.n) < 0.95 * self.n
        right[:lost] = False
        skills = {"letters": np.ones(self.n, dtype=bool), "knowledge": np.ones(self.n, dtype=bool)}
        skills[self.skill] = right
        return PlanMeasurement(loss, loss < 4, np.linspace(1, 2, 8), 0.5, skills)


FEW = {"examples": 12, "windows": 2, "candidates": 2, "max_heads": 2}


def grown(monkeypatch, tiny, ranking, *arguments, auto=None, blend=None, **settings):
    made = Made(*arguments, **settings)
    monkeypatch.setattr(Measuring, "_measure", lambda *given: made(*given))  # noqa: PLW0108
    options = PlanOptions(heads="auto", blend=blend, auto=Auto(**FEW | (auto or {})))
    return grow(tiny, ranking, options), made


def test_heads_that_cost_a_skill_are_passed_over(tiny, ranking, monkeypatch):
    first, second = (str(score.site) for score in ranking.top(2))
    chosen, made = grown(monkeypatch, tiny, ranking, {first: 2.0, second: 0.5}, {first: 0.9, second: 0.0}, blend=1.0)
    assert [str(head) for site in chosen.sites for head in site.each()] == [second]
    growth = chosen.growth
    assert growth.skills == {"letters": pytest.approx(0.949, abs=0.01), "knowledge": 1.0}
    costly = [trial for trial in growth.rounds[0].trials if str(trial.site) == first]
    assert costly[0].beyond == ("letters",)
    assert any(steps == 25 for _, steps in made.seen)  # the winner is judged once more, tuned for a few steps


def test_a_gate_is_found_that_keeps_the_skill(tiny, ranking, monkeypatch):
    first = str(ranking.top(1)[0].site)
    chosen, _ = grown(monkeypatch, tiny, ranking, {first: 2.0}, {first: 0.05})
    assert chosen.blend == 0.25  # which costs 1 of 256 answers; a gate of .5 costs 3, which may be 2 in 100


def test_text_is_bounded_where_the_base_has_no_other_skill(tiny, ranking, monkeypatch):
    made = Made({str(score.site): 2.0 for score in ranking.heads}, {})

    def at_chance(*given):
        measured = made(*given)
        text = measured.text + (0 if given[1] is None else 0.5)  # nats
        return PlanMeasurement(
            measured.loss, measured.correct, text, 0.5, {name: np.arange(256) % 12 == 0 for name in measured.skills}
        )

    monkeypatch.setattr(Measuring, "_measure", at_chance)
    with pytest.raises(NoPlan) as refused:
        grow(tiny, ranking, PlanOptions(heads="auto", auto=Auto(**FEW)))
    assert refused.value.growth.skills == {}
    assert {each.beyond for each in refused.value.growth.candidates} == {("text",)}


def test_text_that_the_base_only_guesses_bounds_nothing(tiny, ranking, monkeypatch, capsys):
    made = Made({str(score.site): 2.0 for score in ranking.heads}, {})

    def guessing(*given):
        measured = made(*given)
        return replace(measured, text=measured.text + 20 + (0 if given[1] is None else 0.05))  # nats; guessing is 7

    monkeypatch.setattr(Measuring, "_measure", guessing)
    chosen = grow(tiny, ranking, PlanOptions(heads="auto", auto=Auto(**FEW)))
    assert all(not each.beyond for each in chosen.growth.candidates)
    assert "no better than guessing" in " ".join(capsys.readouterr().err.split())


def test_more_text_is_measured_only_where_a_part_leaves_the_bound_open(tiny, ranking):
    chosen, subject = plan(ranking, heads=3), Subject.of(tiny)
    questions = skill_questions(Skill(probe="kv", options={"pairs": 4}), tiny.tokenizer, Data(), 2, 5)

    def measured(bound: float) -> tuple[PlanMeasurement, PlanMeasurement]:
        auto = Auto(windows=3, skill_examples=2, text_bound=bound)
        measuring = Measuring.of(
            subject, questions, auto, data=Data(), tuning=SHORT, taught="kv", batch_size=8, seed=0, kept=None,
        )  # fmt: skip
        return measuring.base, measuring.measure([chosen], "a plan")[0]

    base, part = measured(100.0)
    assert (len(base.text), len(part.text)) == (12, 3)
    change = mean(part.text_change(base))
    assert 0 < change.value < change.ci95[1]
    assert len(measured(0.0)[1].text) == 3  # beyond the bound by its value
    whole = measured((change.value + change.ci95[1]) / 2)[1]
    assert len(whole.text) == 12
    assert np.array_equal(whole.text[:3], part.text)
    assert np.array_equal(whole.text_change(base), whole.text - base.text)


def test_what_tuning_takes_counts_too(tiny, ranking, monkeypatch):
    first, second = (str(score.site) for score in ranking.top(2))
    auto = {"max_heads": 1}
    chosen, _ = grown(
        monkeypatch, tiny, ranking, {first: 2.0, second: 0.5}, {}, {first: 0.9}, auto=auto, blend=1.0,
    )  # fmt: skip
    assert [str(site) for site in chosen.sites] == [second]
    last = chosen.growth.candidates[-2:]
    assert {str(each.sites[0]): each.beyond for each in last} == {first: ("letters",), second: ()}
    untrained, _ = grown(
        monkeypatch, tiny, ranking, {first: 2.0, second: 0.5}, {}, {first: 0.9}, auto=auto | {"steps": 0}, blend=1.0,
    )  # fmt: skip
    assert [str(site) for site in untrained.sites] == [first]


@pytest.mark.parametrize(("more", "heads"), [(0.0001, 1), (0.3, 2)])
def test_after_the_steps_too_a_head_has_to_be_worth_its_cache(tiny, ranking, monkeypatch, more, heads):
    first, second = (str(score.site) for score in ranking.top(2))
    untrained, learned = {first: 2.0, second: 0.5}, {first: 1.0, second: more}
    chosen, _ = grown(monkeypatch, tiny, ranking, untrained, {}, learned=learned, blend=1.0)
    assert len(chosen.growth.heads()) == 2  # untrained the second is worth it
    assert sum(len(site.heads) for site in chosen.sites) == heads


def test_where_no_plan_keeps_the_bounds_the_frontier_is_shown(tiny, ranking, monkeypatch, capsys):
    heads = [str(score.site) for score in ranking.top(4)]
    saves = dict(zip(heads, (2.0, 1.0, 0.5, 0.2), strict=True))
    with pytest.raises(NoPlan, match="no plan keeps what the base can do") as refused:
        grown(monkeypatch, tiny, ranking, saves, dict.fromkeys(heads, 40.0))
    growth = refused.value.growth
    assert growth.candidates
    assert all(candidate.beyond == ("letters",) for candidate in growth.candidates)
    said = " ".join(capsys.readouterr().err.split())
    assert all(str(candidate) in said for candidate in growth.frontier())
    assert "\n" not in str(refused.value)


def test_a_skill_that_the_base_does_not_have_bounds_nothing(tiny, ranking, monkeypatch, capsys):
    first = str(ranking.top(1)[0].site)
    made = Made({first: 2.0}, {})

    def at_chance(*given):
        measured = made(*given)
        return PlanMeasurement(measured.loss, measured.correct, measured.text, 0.5, {
            "letters": np.arange(256) % 4 == (0 if given[1] is None else 1 + given[1].sites[0].layer % 2),
            "knowledge": measured.skills["knowledge"],
        })  # fmt: skip

    monkeypatch.setattr(Measuring, "_measure", at_chance)
    chosen = grow(tiny, ranking, PlanOptions(heads="auto", auto=Auto(**FEW)))
    assert chosen.growth.skills == {"knowledge": 1.0}
    assert "at chance on letters" in capsys.readouterr().err


def candidate(accuracy, skill) -> Candidate:
    return Candidate(
        sites=("L1.H0",), blend=None, steps=0, saved=Saved(value=0, ci95=(0, 0)), accuracy=accuracy, loss=1, text_loss=0,
        skills={"letters": skill},
    )  # fmt: skip


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12))
def test_the_frontier(points):
    growth = Growth(
        probe={"name": "kv"}, accuracy=0.1, loss=1, rounds=(), skills={"letters": 0.9},
        candidates=tuple(candidate(*point) for point in points), measured=1, seconds=0,
    )  # fmt: skip
    frontier = growth.frontier()
    for each in growth.candidates:
        assert any(other.accuracy >= each.accuracy and growth.cost(other) <= growth.cost(each) for other in frontier)
    accuracies = [each.accuracy for each in frontier]
    assert accuracies == sorted(set(accuracies))


def test_a_plan_is_tuned_for_a_few_steps_and_the_base_stays(tiny, ranking):
    """The real measurement: untrained, and after steps, on a model whose weights the trial must not change."""
    subject = Subject.of(tiny)
    before = {name: p.clone() for name, p in tiny.model.named_parameters()}
    questions = skill_questions(Skill(probe="kv", options={"pairs": 4}), tiny.tokenizer, Data(), 8, 5)
    measuring = Measuring.of(
        subject, questions, Auto(windows=2, skill_examples=8),
        data=Data(), tuning=SHORT, taught="kv", batch_size=8, seed=0, kept=None,
    )  # fmt: skip
    chosen = plan(ranking, heads=1, blend=0.5)
    (base,), (untrained,), (tuned,) = (
        measuring.measure([None], "base"), measuring.measure([chosen], "untrained"), measuring.measure([chosen], "tuned", 2),
    )  # fmt: skip
    assert {*untrained.skills} == {"letters", "knowledge"}
    assert not np.array_equal(untrained.loss, tuned.loss)
    assert not np.array_equal(base.loss, untrained.loss)
    for name, p in tiny.model.named_parameters():
        assert torch.equal(p, before[name]), name
