"""Figures: results and names, chance, the grafts' own attention, what of an example is drawn, and atlases of many heads."""

import inspect
import shutil
import sys
import warnings
from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest
from matplotlib import image as images

from surgery.errors import UserError
from surgery.evaluation import views
from surgery.evaluation.bench import Entry
from surgery.evaluation.report import Report
from surgery.figures import plotting
from surgery.figures.chance import chance
from surgery.figures.charts import chart
from surgery.figures.example import short_question, window
from surgery.figures.lines import Figure, Point, Series, looks
from surgery.figures.views.atlas import draw_scores, grid
from surgery.figures.views.mixing import draw_grafts, mixing
from surgery.figures.views.results import cost_figures, draw
from surgery.jobs import report_folder
from surgery.jobs.output_folder import Run, check_folder
from surgery.locating.ranking import Ranking, Score
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.records.record import provenance
from surgery.records.site import Site
from surgery.runtime import listing
from surgery.runtime.listing import listed
from surgery.runtime.ownership.files import writing
from surgery.splicing.splice import adopt, splice
from surgery.statistics import mean, proportion
from surgery.studies import redraw
from surgery.world.tokenizer import build_tokenizer
from tests.models import ROOT, VOCABULARY, names, random_base

pytestmark = pytest.mark.usefixtures("painted")
CONTROL_NAMES = ("control_tuned", "control_random_site", "control_same_layer")


@pytest.fixture
def drawn(painted, monkeypatch):
    """The axes of every figure that is drawn, instead of a file."""
    figures = []
    original = plotting.drawing

    def spy(path, *args, **options):
        context = original(path, *args, **options)
        figure, axes = context.gen.send(None)
        figures.append((figure, axes))

        class Entered:
            def __enter__(self):
                return figure, axes

            def __exit__(self, *error):
                context.gen.close()

        return Entered()

    monkeypatch.setattr(plotting, "drawing", spy)
    return figures


@pytest.mark.parametrize("name", listed("views"))
def test_a_view_has_what_its_moments_ask_for(name):
    for moment in views.files()[name]:
        draw, asked = getattr(import_module(listed("views")[name]), moment), getattr(views, moment)
        assert len(inspect.signature(draw).parameters) == len(inspect.signature(asked).parameters)


VIEW = """
from surgery.runtime.ownership.files import put

FILES = {"described": ["title.txt"]}

def described(report, out):
    put(out / "title.txt", report.provenance.base.encode())
"""


@pytest.fixture
def view(tmp_path, monkeypatch):
    """Write a view of one's own."""
    file = tmp_path / "mine" / "views" / "title.py"
    file.parent.mkdir(parents=True)
    monkeypatch.setattr(listing, "ROOTS", (*listing.ROOTS, tmp_path / "mine"))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mine", "mine.views", "mine.views.title"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return file.write_text


@pytest.fixture
def write(tmp_path):
    """Write a report, and say which files there are."""
    report = Report.read(ROOT / "recipes" / "demo.report.json")

    def write():
        with writing(tmp_path / "out"):
            report_folder.write_report(views.MeasuredModels(report, None, {}, Recipe(model="base")), tmp_path / "out")
        return names(tmp_path / "out")

    return write


def test_a_view_is_found_and_its_names_are_kept_free(view, write, tmp_path):
    view(VIEW)
    assert {"report.html", "report.json", "report.md", "retrieval.png", "title.txt"} <= {*write()}
    with writing(tmp_path / "run"):
        Run(toolkit="0", verb="bench").write(tmp_path / "run" / "run.json")
    check_folder(tmp_path / "run", "bench", resume=True)
    (tmp_path / "run" / "title.txt").write_text("the user's")
    with pytest.raises(UserError, match=r"title\.txt"):
        check_folder(tmp_path / "run", "bench", resume=True)


def test_without_views_nothing_but_pictures_is_missing(write, monkeypatch, tmp_path):
    write()
    with_pictures = (tmp_path / "out" / "report.md").read_text()
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr(views, "literals", lambda *_: {})
    assert write() == ["report.json", "report.md"]
    without = (tmp_path / "out" / "report.md").read_text()
    assert with_pictures.count("![") == 2
    assert without.split() == [word for line in with_pictures.splitlines() if "![" not in line for word in line.split()]


def test_a_view_that_fails_ends_nothing_and_a_wrong_one_is_named_before_the_work(view, write, capsys, monkeypatch, tmp_path):
    for wrong, error in (("1 / 0", "ZeroDivisionError: division by zero"), ("open('none')", "FileNotFoundError: ")):
        view(VIEW.replace("put(out", f"{wrong}, put(out"))
        monkeypatch.delitem(sys.modules, "mine.views.title", raising=False)
        assert {"report.json", "retrieval.png"} <= {*write()} - {"title.txt"}
        assert f"warning: the view title could not draw: {error}" in capsys.readouterr().err
    view(VIEW.replace('"described"', '"descirbed"'))
    with pytest.raises(UserError, match="the view title draws when 'descirbed'; there are located,"):
        views.files()
    for files, complaint in (
        ('["title.txt"]', "the view title has to say FILES as"), ('{"described": [1]}', "not 1"),
        ('{"described": ["../title.txt"]}', r"not '\.\./title.txt'"), ("{1: [], None: []}", "draws when '1'"),
        ('{"described": ["run.json"]}', "the view title writes run.json"), ("len", "has to say FILES"), ("(", "is no Python"),
    ):  # fmt: skip
        view(VIEW.replace('{"described": ["title.txt"]}', files))
        with pytest.raises(UserError, match=complaint):
            check_folder(tmp_path / "new", "bench")  # before anything is done


def test_a_token_that_no_font_has_is_drawn(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with plotting.drawing(tmp_path / "figure.png", height=1.0) as (_, axes):
            axes[0, 0].set_xlabel("水 \U0001f9e0 $")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_says_its_result_and_names_its_lines(drawn, tmp_path):
    report = Report.read(ROOT / "recipes" / "demo-mamba2.report.json")
    draw(report, tmp_path, "retrieval.png")
    ((_, axes),) = drawn
    axis, models = axes[0, 0], report.models
    best = max((name for name in models if "control" in name), key=lambda name: models[name].kv["64"].accuracy)
    values = [models[name].kv["64"].accuracy for name in ("tuned", "base", best)]
    title = "Key-value retrieval at 64 pairs: tuned {:.3f}, base {:.3f}, the best control {:.3f}".format(*values)
    assert " ".join(axis.get_title(loc="left").split()) == title
    others = sum("control" in name for name in models) - 1
    named = {f"{best.replace('_', ' ')} (best)", f"{others} other controls", "base", "spliced", "tuned", "chance"}
    assert {text.get_text() for text in axis.texts} == named
    assert axis.get_ylabel() == "accuracy (higher is better)"
    places = sorted(text.get_position()[1] for text in axis.texts)
    assert min(b - a for a, b in pairwise(places)) > 0.08  # no label on another


def test_the_page_draws_the_same_lines():
    look = looks(["base", *CONTROL_NAMES])
    values = dict(zip(look, ((0.5, 0.5), (0.4, 0.2), (0.6, 0.1), (0.5, 0.3)), strict=True))
    series = tuple(
        Series(name, look[name], tuple(Point(x, y, f"{y}") for x, y in zip((4, 8), values[name], strict=True))) for name in look
    )
    figure = Figure("KV", "pairs", "pairs", "accuracy", series, top=1.0, chance=((4, 0.25), (8, 0.125)))
    assert figure.result == "KV at 8 pairs: base 0.500, the best control 0.300"
    laid = chart(figure)
    assert laid.title == figure.result
    assert [line.name for line in laid.lines] == list(look)
    assert laid.columns[1].rows[:2] == [("base", "0.5"), ("control_same_layer", "0.3")]
    heights = [(laid.bottom - y) / (laid.bottom - laid.top) for _, y in laid.lines[1].marks]
    assert heights == pytest.approx([0.4, 0.2], abs=0.005)
    assert laid.chance.startswith("M")
    assert laid.header == ["pairs", "base", *CONTROL_NAMES]


def test_models_with_the_same_graft_cost_one_line():
    report = Report.read(ROOT / "recipes" / "demo-mamba2.report.json")
    time, cache = cost_figures(report, looks(list(report.models)))[:2]
    assert [line.name for line in time.series] == [line.name for line in cache.series] == ["base", "spliced and tuned"]
    cells = [report.models[name].cost[-1].milliseconds for name in ("spliced", "tuned")]
    point = time.series[1].points[-1]
    assert (point.y, point.low, point.high) == (pytest.approx(sum(cells) / 2), min(cells), max(cells))
    assert cache.series[1].points[-1].low is None  # they are equal


def test_losses_do_not_begin_at_zero():
    look = looks(["base"])["base"]
    line = Series("base", look, (Point(1, 3.0, "", 2.9, 3.1), Point(2, 3.2, "", 3.1, 3.3)))
    figure = Figure("Loss", "tokens", "tokens", "nats", (line,), falls=True, from_zero=False)
    assert figure.span == pytest.approx((2.88, 3.32))
    assert all(figure.span[0] <= float(label) <= figure.span[1] for _, label in chart(figure).y_ticks)


def test_chance_is_known_of_the_projects_probes():
    assert [chance(task) for task in ("kv.32", "kv_unseen.64", "mqar.8", "needle.256.50")] == [1 / 32, 1 / 64, 1 / 8, 1 / 10]
    assert [chance(task) for task in ("needles.512", "needles_asked.512")] == [1 / 10, 1 / 10]
    assert [chance(task) for task in ("phonebook.8", "copying.8")] == [0, 0]
    assert [chance(task) for task in ("knowledge", "perplexity", "arc_easy", "kv.100000")] == [None] * 4


@pytest.mark.parametrize("kind", ["mamba2", "mamba"])
def test_a_graft_is_shown_as_its_own_attention_and_as_the_mixture(kind, tmp_path):
    words = build_tokenizer()
    base = random_base(vocab_size=VOCABULARY) if kind == "mamba2" else mamba1(len(words))
    plan = Plan(sites=("L1.H2,5",), blend=0.3)
    models = {"base": Entry(base, ""), "open": Entry(splice(base, plan.model_copy(update={"blend": 1.0})), "", plan),
              "hybrid": Entry(splice(base, plan), "", plan)}  # fmt: skip
    before = [gate.clone() for name, gate in models["hybrid"].model.named_parameters() if name.endswith("gate")]
    matrices = mixing(models, words, short_question(words, "kv", {"pairs": 32}, 0), provenance("x", "f" * 64, 0, {}))
    after = [gate for name, gate in models["hybrid"].model.named_parameters() if name.endswith("gate")]
    assert len(before) == len(after) == 1
    assert before[0].equal(after[0])
    assert len(matrices.spans) == 4
    assert matrices.spans[[matrices.answer == span for span in matrices.spans].index(True)] == matrices.answer
    panel = matrices.panels[0]
    assert panel.gates == pytest.approx({"open": 1.0, "hybrid": 0.3})
    assert [(name, what) for name, what, _ in panel.views()][-2:] == [
        ("hybrid", "the graft's own attention"), ("hybrid", "the mixture, 30% attention"),
    ]  # fmt: skip
    own, mixture, ssm = panel.attention["hybrid"], panel.models["hybrid"], panel.models["base"]
    assert own.rows == panel.models["open"].rows  # what a gate of 1 does
    assert own.rows not in (mixture.rows, ssm.rows)
    draw_grafts(matrices, tmp_path / "grafts.png")
    height, width, _ = images.imread(tmp_path / "grafts.png").shape
    assert width == round(plotting.WIDTH * plotting.STYLE["savefig.dpi"])
    assert height > width


def mamba1(words):
    from transformers import MambaConfig, MambaForCausalLM

    torch_config = MambaConfig(vocab_size=-(-words // 16) * 16, hidden_size=32, num_hidden_layers=2, state_size=4)
    return adopt(MambaForCausalLM(torch_config).eval())


def test_what_does_not_fit_is_cut_to_evidence_and_question():
    tokens = [f"t{i}" for i in range(200)]
    spans = [tuple(range(start, start + 6)) for start in range(5, 185, 6)]
    part = window(tokens, spans, spans[7])
    assert part.rows == [spans[7][-1] + 1, 199]
    assert part.labels[-1] == "last token"
    assert [part.columns[i] for i in part.answer] == list(spans[7])
    assert part.columns[-1] == 199
    assert len(part.columns) <= 36
    short = window(tokens[:20], spans[:2], spans[0])
    assert short.columns == list(range(5, 20))
    assert short.rows == [11, 17, 19]
    bare = window(tokens[:9], [], ())
    assert (bare.rows, bare.columns) == ([1, 2, 3, 4, 5, 6, 7, 8], list(range(9)))
    assert window(["a"], [], ()).rows == [0]


def ranking(layers, heads, **scores):
    estimates = {name: [mean(np.array([v, v])) for v in values] for name, values in scores.items()}
    sites = [Site(layer, (head,)) for layer in range(layers) for head in range(heads)]
    rows = tuple(
        Score(site=site, role="gather" if i == 1 else None, **{name: values[i] for name, values in estimates.items()})
        for i, site in enumerate(sites)
    )
    zero, probe = mean(np.zeros(3)), {"name": "kv", "options": {"pairs": 4}, "seed": 3, "examples": 3}
    return Ranking(provenance=provenance("x", "f" * 64, 0, {}), probe=probe, base_accuracy=proportion(np.ones(3)),
                   base_loss=zero, heads=rows,
                   layers=())  # fmt: skip


def test_a_row_of_thousands_of_heads_is_how_scores_fall_off(drawn, tmp_path):
    values = np.random.default_rng(0).normal(size=(2, 1000))
    given = ranking(2, 1000, attribution=values.ravel())
    many = given.model_copy(update={"heads": given.columns.sorted()})
    layout = grid(many)
    assert layout.edges[0] == 0
    assert layout.edges[-1] == 1000
    assert layout.columns == len(layout.edges) - 1 <= 56
    cells = layout.values(many, "attribution")
    for layer in (0, 1):
        order = -np.sort(-values[layer])
        for column, (first, behind) in enumerate(pairwise(layout.edges)):
            part = order[first:behind]
            assert cells[layer, column] == part[np.abs(part).argmax()]
    best = values.argmax(1)
    assert layout.edges[3] == 3  # the first heads have cells of their own
    draw_scores(many, tmp_path / "x.png", Plan(sites=(f"L0.H{best[0]}", f"L1.H{values[1].argmin()}")))
    ((_, axes),) = drawn
    map, bars = axes[0, 0], axes[1, 0]
    frames = [patch for patch in map.patches if not patch.get_fill()]
    assert sorted(frame.get_xy() for frame in frames) == [(-0.5, -0.5), (layout.columns - 1.5, 0.5)]
    assert [text.get_text() for text in map.texts] == ["G"]
    leading = f"L{values.max(1).argmax()}.H{best[values.max(1).argmax()]}"
    assert [label.get_text().strip() for label in bars.get_yticklabels()][::-1][0].startswith(leading)
    assert [label.get_text() for label in map.get_xticklabels()] == ["1", "10", "30", "100", "300", "1,000"]
    assert map.images[0].norm.linthresh == pytest.approx(np.abs(cells).max() / 1000)


def test_a_figure_is_drawn_again_from_its_findings(tmp_path, capsys):
    source = ROOT / "recipes" / "paper" / "delegation.findings.json"
    copy = tmp_path / "delegation.findings.json"
    copy.write_bytes(source.read_bytes())
    assert redraw.main([str(copy)]) == 0
    figure = tmp_path / "delegation.png"
    assert capsys.readouterr().out.strip() == str(figure)
    committed = images.imread(source.with_name("delegation.png"))
    assert np.abs(images.imread(figure) - committed).mean() < 0.01
    assert redraw.main([str(tmp_path / "nothing.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_single_size_has_its_chance_too(drawn, tmp_path):
    look = looks(["base"])["base"]
    series = (Series("base", look, (Point(32, 0.5, ""),)),)
    laid = chart(Figure("", "pairs", "pairs", "accuracy", series, top=1.0, chance=((32, 0.25),)))
    assert f"H{laid.right}" in laid.chance
    report = Report.read(ROOT / "recipes" / "demo-mamba2.report.json")
    small = {name: model.model_copy(update={"kv": {"32": model.kv["32"]}}) for name, model in report.models.items()}
    draw(report.model_copy(update={"models": small}), tmp_path, "retrieval.png")
    assert "chance" in {text.get_text() for text in drawn[0][1][0, 0].texts}
