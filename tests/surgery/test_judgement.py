"""The report's answer in words: a gain is called a gain only where the base retrieves and no control does as well."""

import pytest

from surgery.commands.gate import requirement
from surgery.evaluation.judgement import did_it_help, heading, judge, lost
from surgery.evaluation.markdown import render
from surgery.evaluation.report import Report
from surgery.evaluation.results import Located
from surgery.figures.views.page import render as page
from surgery.records.plan import Plan, PlanWindows
from surgery.statistics import Estimate, Proportion, at_chance
from tests.models import ROOT


@pytest.fixture(scope="module")
def report():
    return Report.read(ROOT / "recipes" / "demo-mamba2.report.json")


def changed(report, name, **fields):
    """The report with another KV 64 of a model: its accuracy, its difference to the base, its evidence."""
    model = report.models[name]
    parts = {}
    if "accuracy" in fields:
        value = fields["accuracy"]
        parts["kv"] = model.kv | {"64": Proportion(accuracy=value, ci95=(value - 0.02, min(1, value + 0.02)), n=1000)}
    if "change" in fields:
        low, value, high = fields["change"]
        parts["change"] = model.change | {"kv.64": Estimate(value=value, ci95=(low, high), n=1000)}
        parts["evidence"] = model.evidence | {
            "kv.64": model.evidence["kv.64"].model_copy(update={"differs": fields["differs"], "p_holm": 0.5})
        }
    return report.model_copy(update={"models": report.models | {name: model.model_copy(update=parts)}})


def test_a_gain_above_all_controls_is_a_yes_with_its_cost(report):
    (judged,) = judge(report)  # of a run, the tuned model alone
    assert (judged.model, judged.verdict) == ("tuned", "yes")
    said = did_it_help(report)
    assert said.startswith("Did it help? Yes: with 64 pairs tuned answers 0.936 of the questions, the base 0.279")
    assert "The best of 6 controls is control_tuned with 0.305." in said
    assert "knowledge 0.980 (base 0.988, no difference seen)" in said
    assert "loss on held-out text +0.0026 nats per token" in said
    assert render(report).split("\n\n")[1] == said
    assert "With 64 pairs tuned answers 0.936 of the questions, the base 0.279" in page(report)


@pytest.mark.parametrize(
    ("change", "elsewhere", "verdict", "said"),
    [
        ((-0.01, 0.0, 0.01), (-0.5, -0.4, -0.3), "yes", "Yes, retrieval is kept: with 64 pairs tuned answers"),
        ((-0.01, 0.0, 0.01), (-0.02, 0.0, 0.02), "yes", "it is not shown that the choice of heads matters"),
        ((-0.03, -0.01, 0.01), (-0.5, -0.4, -0.3), "unclear", "so a fall by more than 0.02 is not ruled out"),
        ((-0.09, -0.06, -0.03), (-0.5, -0.4, -0.3), "no", "No, retrieval is not kept"),
        ((-0.01, 0.0, 0.01), None, "yes", "Windows at other heads were not measured"),
    ],
)
def test_of_windows_it_is_asked_what_they_keep(report, change, elsewhere, verdict, said):
    windows = Plan(kind="window", windows=PlanWindows(sites=("L1.H0",)))
    for name, of in (("tuned", change), ("control_tuned", elsewhere)):
        if of is not None:
            report = changed(report, name, change=of, differs=False)
    tuned = report["tuned"].model_copy(update={"plan": windows})
    models = {"base": report["base"], "tuned": tuned}
    if elsewhere is not None:
        models["control_random_windows_tuned"] = report["control_tuned"].model_copy(update={"plan": windows})
    (judged,) = judge(report.model_copy(update={"models": models}))
    assert judged.verdict == verdict
    assert said in " ".join([judged.answer, *judged.details])


def test_what_the_base_does_not_know_is_told(report):
    """Of each skill at chance, and where text and facts are of a world that it was not trained on; and a fall that too few
    questions cannot rule out."""
    base, tuned = report["base"], report["tuned"]
    guessed = base.model_copy(update={"guessing": {"knowledge": 0.99}, "invented": ("data.held_out_text", "data.facts")})
    said = did_it_help(report.model_copy(update={"models": report.models | {"base": guessed}}))
    assert "The base is at chance on knowledge" in said
    assert "knowledge 0.980" not in said
    assert "data.held_out_text and data.facts are those of the small invented world" in said
    wide = tuned.change["knowledge"].model_copy(update={"ci95": (-0.041, 0.02)})
    unsure = tuned.model_copy(update={"change": tuned.change | {"knowledge": wide}})
    said = did_it_help(report.model_copy(update={"models": report.models | {"tuned": unsure}}))
    assert "(base 0.988, no difference seen, a fall by 0.041 not ruled out)" in said


@pytest.mark.parametrize("low", [0.031, 0.02])
def test_a_base_at_chance_is_refused_whatever_was_gained(report, low):
    located = Located(probe="kv (pairs 32)", accuracy=Proportion(accuracy=0.05, ci95=(low, 0.08), n=256), chance=1 / 32)
    (judged,) = judge(report.model_copy(update={"located": located}))
    assert judged.verdict == "not to be judged"
    assert "cannot be attributed to an edit of located heads" in judged.answer
    assert "at chance on the probe that located the heads (kv (pairs 32): 0.050" in judged.answer
    better = located.model_copy(update={"accuracy": Proportion(accuracy=0.05, ci95=(0.04, 0.08), n=256)})
    assert judge(report.model_copy(update={"located": better}))[0].verdict == "yes"


def test_where_needles_alone_were_asked_they_are_judged(report):
    accuracies = {"base": 0.16, "tuned": 1.0, "control_tuned": 0.48}
    models = {}
    for name, accuracy in accuracies.items():
        result = Proportion(accuracy=accuracy, ci95=(accuracy - 0.02, accuracy), n=200)
        change = Estimate(value=accuracy - 0.16, ci95=(accuracy - 0.2, accuracy - 0.14), n=200)
        evidence = report.models["tuned"].evidence["kv.64"]
        tasks = {"needle.256.50": result, "needle.2048.50": result, "needle.4096.10": result, "needles.4096": result}
        compared = {"change": {"needle.2048.50": change}, "evidence": {"needle.2048.50": evidence}} if name != "base" else {}
        empty = {"kv": {}, "knowledge": None, "perplexity": None, "change": {}, "evidence": {}}
        models[name] = report.models[name].model_copy(update={**empty, "tasks": tasks, **compared})
    long = report.model_copy(update={"models": models})
    said = did_it_help(long)
    assert said.startswith(
        "Did it help? Yes: with a needle in the middle of 2,048 tokens tuned answers 1.000 of the questions, "
    )
    assert "The only control is control_tuned with 0.480." in said
    assert "| model |\n" not in render(long)  # a table of names alone
    control = models["control_tuned"].model_copy(update={"change": models["tuned"].change})
    as_good = long.model_copy(update={"models": models | {"control_tuned": control}})
    assert judge(as_good)[0].verdict == "unclear"


def test_where_ruler_alone_was_asked_it_is_judged(report):
    """By all tasks together, at the longest length at which anything was written."""
    evidence = report.models["tuned"].evidence["kv.64"]
    empty = {"kv": {}, "knowledge": None, "perplexity": None, "change": {}, "evidence": {}}

    def asked(**shares):
        models = {}
        for name, share in shares.items():
            tasks, change = {}, {}
            for length, each in {"512": share, "2048": share / 2, "8192": 0.0}.items():
                tasks |= {f"ruler.{length}": (result := Estimate(value=each, ci95=(each - 0.01, each + 0.01), n=200))}
                change |= {f"ruler.{length}": result}
            compared = {"change": change, "evidence": dict.fromkeys(change, evidence)} if name != "base" else {}
            models[name] = report.models[name].model_copy(update={**empty, "tasks": tasks, **compared})
        return report.model_copy(update={"models": models})

    said = did_it_help(asked(base=0.0, tuned=0.8, control_tuned=0.2))
    assert said.startswith("Did it help? Yes: of RULER's answers, after 2,048 tokens, tuned writes 0.400, the base 0.000")
    nothing = did_it_help(asked(base=0.0, tuned=0.0))
    assert "neither tuned nor the base writes any answer of RULER, at 512 and 2,048 and 8,192 tokens" in nothing


def test_a_base_at_chance_at_every_size_is_refused_without_a_ranking(report):
    """A comparison does not locate; a base at chance at the largest size alone may have gained there."""
    base = report.models["base"]
    guess = {size: Proportion(accuracy=1 / int(size), ci95=(0.0, 1.5 / int(size)), n=1000) for size in base.kv}

    def with_kv(kv):
        return report.model_copy(update={"models": report.models | {"base": base.model_copy(update={"kv": kv})}})

    assert judge(with_kv(guess))[0].verdict == "not to be judged"
    assert judge(with_kv(base.kv | {"64": guess["64"]}))[0].verdict == "yes"
    assert not at_chance(base.kv["64"], 1 / 64)


@pytest.mark.parametrize(
    ("control", "words"),
    [("control_tuned", "it is not shown that the graft helps"),
     ("control_same_layer_tuned", "it is not shown that the choice of heads matters")],
)  # fmt: skip
def test_a_control_that_does_as_well_takes_the_yes_away(report, control, words):
    (judged,) = judge(changed(report, control, accuracy=0.93, change=(0.63, 0.65, 0.67), differs=True))
    assert judged.verdict == "unclear"
    assert words in judged.details[0]


@pytest.mark.parametrize(
    ("change", "differs", "verdict", "begins"),
    [
        ((0.001, 0.03, 0.06), False, "perhaps", "Perhaps: "),
        ((-0.02, 0.01, 0.04), False, "no", "No difference seen: "),
        ((-0.3, -0.2, -0.1), True, "no", "No, worse: "),
    ],
)
def test_what_is_no_gain_is_not_called_one(report, change, differs, verdict, begins):
    (judged,) = judge(changed(report, "tuned", change=change, differs=differs))
    assert (judged.verdict, judged.answer[: len(begins)]) == (verdict, begins)


def test_a_perfect_base_leaves_nothing_to_gain(report):
    perfect = changed(changed(report, "base", accuracy=1.0), "tuned", accuracy=1.0, change=(0.0, 0.0, 0.0), differs=False)
    assert "a gain could not show" in did_it_help(perfect)


def test_a_comparison_answers_for_every_model_and_misses_the_controls(report):
    """Names are those of folders: only a run's own controls are controls."""
    two = {"base": report.models["base"], "controlled": report.models["tuned"], "tuned_high": report.models["spliced"]}
    first, second = did_it_help(report.model_copy(update={"models": two})).split("\n\n")
    assert first.startswith("Did controlled help? Unclear: with 64 pairs")
    assert second.startswith("Did tuned_high help? Unclear: with 64 pairs")
    assert "but no control was measured" in first
    assert "`surgery bench BASE HYBRID` measures that control" in first


def test_without_retrieval_there_is_nothing_to_judge(report):
    models = {name: model.model_copy(update={"kv": {}}) for name, model in report.models.items()}
    (judged,) = judge(report.model_copy(update={"models": models}))
    assert judged.verdict == "not to be judged"
    assert "retrieval was not measured" in judged.answer


def test_a_report_without_differences_is_not_judged(report):
    bare = {name: model.model_copy(update={"change": {}}) for name, model in report.models.items()}
    (judged,) = judge(report.model_copy(update={"models": bare}))
    assert judged.verdict == "not to be judged"
    cost = "Cost: knowledge 0.980 (base 0.988); letters 0.296 (base 0.292); loss on held-out text +0.0026 nats per token"
    assert judged.details[0].startswith(cost)


def with_change(report, task, value, low, high):
    """The report with another difference of the tuned model to the base in one task."""
    tuned = report.models["tuned"]
    changes = tuned.change | {task: Estimate(value=value, ci95=(low, high), n=1000)}
    return report.model_copy(update={"models": report.models | {"tuned": tuned.model_copy(update={"change": changes})}})


@pytest.mark.parametrize(
    ("task", "change", "is_lost"),
    [
        ("letters", (-0.66, -0.7, -0.62), True),
        ("letters", (-0.03, -0.07, 0.01), False),  # the interval holds 0
        ("letters", (-0.015, -0.02, -0.01), False),  # within the bound
        ("kv.4", (-0.05, -0.06, -0.04), True),
        ("perplexity", (0.02, 0.015, 0.025), True),
        ("perplexity", (0.006, 0.004, 0.008), False),
    ],
)
def test_a_gain_beside_a_loss_is_no_yes(report, task, change, is_lost):
    """The first sentence names what was gained and what was lost, and the gate for a CI fails."""
    report = with_change(report, task, *change)
    (judged,) = judge(report)
    assert lost(report, "tuned") == ([task] if is_lost else [])
    assert judged.verdict == ("mixed" if is_lost else "yes")
    if is_lost:
        assert judged.answer.startswith(
            "It gains and loses: with 64 pairs tuned answers 0.936 of the questions, the base 0.279"
        )
        assert f"it loses {heading(task)} " in judged.answer
        assert "It gains and loses" in page(report)
    required = requirement("no loss", [*report.models], ["kv.64"])
    failed = [line for line in required.failures(report) if " tuned loses" in line]
    assert len(failed) == is_lost


def test_heads_located_by_letters_are_judged_by_letters():
    report = Report.read(ROOT / "recipes" / "letters.report.json")
    located = Located(probe="letters", accuracy=Proportion(accuracy=0.98, ci95=(0.95, 1.0), n=128), chance=0.25)
    (worse,) = judge(report.model_copy(update={"located": located}))
    assert worse.answer.startswith(
        "No, worse: on letters tuned answers 0.914 of the questions, the base 0.982 (difference -0.068"
    )
    assert worse.answer.endswith("chance 0.250).")
    turned = report.models | {"base": report.models["tuned"], "tuned": report.models["base"].model_copy(
        update={"change": {"letters": Estimate(value=0.068, ci95=(0.05, 0.09), n=500)},
                "evidence": {"letters": report.models["tuned"].evidence["letters"]}}
    )}  # fmt: skip
    (better,) = judge(report.model_copy(update={"located": located, "models": turned}))
    assert better.answer.startswith("Yes: on letters tuned answers 0.982 of the questions, the base 0.914 (difference +0.068")


def test_keeping_what_the_base_does_not_know_says_nothing(report):
    """A text on which it is no better than guessing among all tokens, and facts at chance."""
    base = report.models["base"]
    lost_on_both = {"perplexity": base.perplexity.loss.value - 0.01, "knowledge": base.knowledge.accuracy}
    for guessing, names in ((lost_on_both, True), ({"perplexity": 99.0, "knowledge": 0.1}, False), ({}, False)):
        models = report.models | {"base": base.model_copy(update={"guessing": guessing})}
        said = did_it_help(report.model_copy(update={"models": models}))
        assert ("name a text that it knows (data.held_out_text)" in said) == names
        assert ("name facts that it knows (data.facts)" in said) == names
