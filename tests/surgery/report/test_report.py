"""The report as people read it: terminal, Markdown, page and figures, from records with made-up numbers."""

import re
from html.parser import HTMLParser

import pytest

from surgery.evaluation.verdict import judge
from surgery.records.plan import Start
from surgery.records.ranking import Circuit, Edge, Estimate, HeadScore, Ranking, Roles
from surgery.records.record import Provenance
from surgery.records.report import Change, Cost, Measurement, ModelReport, OnText, Report, Verdict
from surgery.report.figures import as_svg, draw_gain, draw_retrieval, save_figures
from surgery.report.markdown import escape, render_markdown
from surgery.report.page import render_page, write_report
from surgery.report.tables import costs_table, describe_change, describe_p, results_table, short_table

SIZES = (4, 16, 64)
HOSTILE = '<script>alert("x")</script>|`$'


def estimate(mean, margin=0.02, n=200):
    return Estimate(mean=mean, low=mean - margin, high=mean + margin, n=n)


def change(mean, p=1e-9):
    return Change(mean=mean, low=mean - 0.02, high=mean + 0.02, n=200, p=p, detectable=0.04)


def model(description, role, accuracy, sizes=SIZES, **more):
    results = {f"kv.{size}": estimate(accuracy) for size in sizes} | {"text": estimate(1.8)}
    changes = {} if role == "base" else {name: change(accuracy - 0.3) for name in results}
    kl = OnText(kl=estimate(0.001, 0.0005), documents=8, tokens=64, untouched=3, acts=estimate(0.01), change_before=0.0)
    cost = Cost(context=1024, batch=1, cache_bytes=2**16, milliseconds=2.0, token=estimate(1.0))
    fields = {"on_text": None if role == "base" else kl, "costs": (cost,), "fingerprint": "f" * 64, **more}
    return ModelReport(description=description, role=role, results=results, changes=changes, **fields)


def make_report(sizes=SIZES, name="my-mamba", **models):
    measurements = {
        f"kv.{size}": Measurement(
            label=f"dictionaries of {size} pairs", short=f"{size} pairs", metric="accuracy", chance=1 / size, digest="d"
        )
        for size in sizes
    } | {"text": Measurement(label="held-out text", short="loss on text", metric="loss", digest="d")}
    made = {
        "base": model("base", "base", 0.3, sizes),
        "tuned": model("2 located heads, tuned", "hybrid", 0.9, sizes),
        "control_tuned": model("no attention, the same layers tuned", "control", 0.4, sizes, behind=change(0.5)),
        "control_same_layer": model("2 other heads of the same layer, tuned", "control", 0.6, sizes, behind=change(0.3)),
        **models,
    }
    verdict = Verdict(
        answer="yes", model="tuned", measurement=f"kv.{sizes[-1]}", sentence="Yes: it scores more.", details=("A detail.",)
    )
    origin = Provenance(
        toolkit="1.0.0",
        created="2026-01-01T00:00:00",
        packages={"torch": "2"},
        machine="m",
        seed=0,
        base=name,
        fingerprint="f" * 64,
    )
    return Report(verdict=verdict, measurements=measurements, models=made, provenance=origin)


class Loads(HTMLParser):
    """What a page would load, and its text in order."""

    def __init__(self):
        super().__init__()
        self.loaded, self.words, self.tags = [], [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.loaded += [
            value for name, value in attrs if name in ("src", "href", "xlink:href", "data") and not value.startswith("#")
        ]

    def handle_data(self, data):
        self.words.append(data.strip())


def read(page):
    parser = Loads()
    parser.feed(page)
    return parser


def test_a_page_loads_nothing_and_begins_with_the_verdict():
    page = render_page(make_report(), hybrid="hybrid")
    parsed = read(page)
    assert parsed.loaded == []
    assert "script" not in parsed.tags
    assert not re.search(r"url\((?!#)|@import", page)
    text = " ".join(parsed.words)
    assert text.count("from_pretrained") == text.count("trust_remote_code=True") == 2  # else transformers asks at the terminal
    assert text.index("Did it help?") < text.index("from_pretrained") < text.index("64 pairs")
    assert page.count("<svg") == 2
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_page_has_the_ink_of_day_and_night():
    page = render_page(make_report())
    assert "prefers-color-scheme: dark" in page
    assert "from_pretrained" not in page
    svg = as_svg(draw_retrieval(make_report()), "retrieval")
    assert "currentColor" in svg
    assert "#24292f" not in svg


def test_names_of_others_are_text():
    report = make_report(name=HOSTILE, **{HOSTILE: model(HOSTILE, "hybrid", 0.5)})
    assert "script" not in read(render_page(report)).tags
    markdown = render_markdown(report)
    assert "<script" not in re.sub(r"\\.", "", markdown)
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert all("\n" not in row for row in rows)


def test_markdown_of_a_name_makes_no_link_and_leaves_intervals():
    assert escape("0.74 [0.61, 0.80]") == "0.74 [0.61, 0.80]"
    assert escape("[a](http://x) <b> *c*") == r"\[a](http://x) \<b\> \*c\*"


def test_no_control_character_reaches_a_report():
    report = make_report(name="a\x1b[31m", **{"a\x1b[31m": model("b\x1b]0;", "hybrid", 0.5)})
    assert "\x1b" not in render_page(report) + render_markdown(report)


def test_the_strongest_control_is_in_every_short_form():
    report = make_report()
    strongest = report.models["control_same_layer"].description
    assert report.best_control() == "control_same_layer"
    assert strongest in report.summary()
    assert strongest in [row[0] for row in short_table(report)]
    assert strongest in as_svg(draw_retrieval(report), "a")
    assert strongest in as_svg(draw_gain(report), "b")


def test_figures_only_of_what_was_measured(tmp_path):
    assert draw_retrieval(make_report(sizes=(64,))) is None
    bare = model("2 located heads, tuned", "hybrid", 0.9, on_text=None)
    controls = {
        name: model("c", "control", 0.4, on_text=None, behind=change(0.1)) for name in ("control_tuned", "control_same_layer")
    }
    assert draw_gain(make_report(tuned=bare, **controls)) is None
    assert save_figures({"it": draw_retrieval(make_report()), "none": None}, tmp_path) == ["it.png"]


def test_a_summary_is_short():
    lines = make_report().summary().splitlines()
    assert lines[0].startswith("Did it help? Yes")
    assert len(lines) <= 12


def test_tables_are_rectangular():
    report = make_report()
    for table in (short_table(report), results_table(report), costs_table(report)):
        assert {len(row) for row in table} == {len(table[0])}
    assert len(costs_table(report)) == 3  # controls cost what their models cost


@pytest.mark.parametrize(("p", "words"), [(1e-12, "p < 0.001"), (0.0123, "p = 0.012")])
def test_p_values_as_people_read_them(p, words):
    assert describe_p(p) == words


def test_a_difference_in_words():
    accuracy, loss = (Measurement(label="x", short="x", metric=metric, digest="d") for metric in ("accuracy", "loss"))
    assert describe_change(change(0.1), accuracy).startswith("better")
    assert describe_change(change(0.1), loss).startswith("worse")
    assert describe_change(change(0.01, p=0.6), accuracy).startswith("no difference")
    assert not change(0.1, p=0.2).shown


def test_a_gate_in_a_sentence():
    fields = {"kl": estimate(0.001, 0.0005), "documents": 8, "tokens": 64, "untouched": 3}
    assert "bit for bit" in OnText(**fields, acts=estimate(0.01), change_before=0.0).sentence()
    assert "bit for bit" not in OnText(**fields, acts=estimate(0.01), change_before=0.5).sentence()
    assert "every token" in OnText(**fields, acts=Estimate(mean=1, low=1, high=1, n=8), change_before=0.0).sentence()


@pytest.mark.parametrize(("acts", "told"), [(0.01, False), (0.59, True), (1.0, False)])
def test_a_graft_that_acts_on_much_text_is_told(acts, told):
    seen = OnText(kl=estimate(0.001), documents=8, tokens=64, untouched=0, acts=estimate(acts), change_before=0.0)
    made = make_report(tuned=model("2 located heads, tuned", "hybrid", 0.9, on_text=seen))
    verdict = judge(made.measurements, made.models, "tuned", "kv.64", None)
    assert ("plan.keep_skills=true" in " ".join(verdict.details)) == told


def test_grafts_that_closed_are_named():
    models = {"base": model("base", "base", 0.3), "tuned": model("2 heads", "hybrid", 0.3, sites=("L0.H1,2",))}
    verdict = judge(make_report().measurements, models, "tuned", f"kv.{SIZES[-1]}", None)
    assert (verdict.answer, "closed in tuning" in verdict.advice) == ("no", True)


@pytest.mark.parametrize(("tuned", "untrained", "fault"), [(0.1, 0.6, True), (0.1, 0.1, False), (0.3, 0.9, True)])
def test_advice_after_harm_is_not_to_do_more(tuned, untrained, fault):
    made = make_report(tuned=model("tuned", "hybrid", tuned), spliced=model("spliced", "hybrid", untrained))
    verdict = judge(made.measurements, made.models, "tuned", "kv.64", None)
    assert verdict.answer == "no"
    assert "Lower tune.learning_rate" in verdict.advice
    assert "more heads" not in verdict.advice
    assert ("Tuning did the harm" in verdict.advice) == (verdict.remedy == "lower rate") == fault


@pytest.mark.parametrize(("margin", "kept"), [(0.005, True), (0.3, False)])
def test_a_skill_is_kept_where_a_fall_is_ruled_out(margin, kept):
    changes = {"kv.64": change(0.6), "text": Change(mean=0.0, low=-margin, high=margin, n=20, p=1.0)}
    made = make_report(tuned=model("tuned", "hybrid", 0.9).model_copy(update={"changes": changes}))
    details = judge(made.measurements, made.models, "tuned", "kv.64", None).details[1]
    assert details.startswith("Kept: held-out text" if kept else "Not shown to fall, nor to be kept: held-out text")


def test_files_of_a_report(tmp_path):
    report = make_report()
    names = write_report(report, tmp_path, hybrid="hybrid")
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    assert Report.read(tmp_path / "report.json") == report
    assert "![retrieval](retrieval.png)" in (tmp_path / "report.md").read_text()
    assert "from_pretrained" in (tmp_path / "report.md").read_text()


def test_the_circuit_is_told_where_it_was_measured():
    places = dict.fromkeys(("everywhere", "query", "evidence", "spans", "elsewhere"), estimate(0.5))
    heads = tuple(
        HeadScore(site=site, kind="ssm", slope=0.1, start=Start(), roles=Roles(**places, role=role))
        for site, role in (("L1.H3", "aggregate"), ("L0.H1", "gather"))
    )
    circuit = Circuit(
        gather=("L0.H1",),
        aggregate=("L1.H3",),
        edges=(Edge(source="L0.H1", target="L1.H3", share=0.5),),
        sentence="L0.H1 gathers.",
    )
    ranking = Ranking(
        heads=heads, circuit=circuit, probe="kv, 32 pairs", accuracy=estimate(0.5), chance=0.03, loss=1.0, questions=10
    )
    page = render_page(make_report(), ranking=ranking)
    assert "L0.H1 gathers." in page
    assert page.count("<svg") == 3
