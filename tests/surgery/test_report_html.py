"""report.html: all of a report in one file, drawn in a real browser, at desktop and phone width, and nothing asked for."""

import base64
import html as escaping
import io
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from PIL import Image

from surgery.errors import UserError
from surgery.evaluation.bench import Entry
from surgery.evaluation.report import Report
from surgery.evaluation.results import Cost, ModelReport, Perplexity, Speed
from surgery.figures import atlas_page
from surgery.figures.charts import chart
from surgery.figures.example import short_question
from surgery.figures.lines import Figure, Point, Series, looks
from surgery.figures.views import atlas as locating_atlas
from surgery.figures.views import page as html
from surgery.figures.views.mixing import Mixing, mixing
from surgery.locating.matrices import mixing_matrices
from surgery.locating.ranking import Ranking, Score
from surgery.locating.subject import Subject
from surgery.records.plan import Plan
from surgery.records.record import provenance
from surgery.records.site import Site
from surgery.splicing.splice import splice
from surgery.statistics import difference, evidence, mean, proportion

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "x\"'><script>document.title = 'taken'</script><img src=https://example.org/x.png>"
PLAN = Plan(sites=("L1.H2,5",))


@pytest.fixture(scope="module")
def entries(base):
    elsewhere = Plan(sites=("L0.H1", "L2.H1"))
    return {
        "base": Entry(base, "unchanged"),
        "spliced": Entry(splice(base, PLAN), EVIL, PLAN),
        "control_random_site": Entry(splice(base, elsewhere), "elsewhere", elsewhere),
    }


def model_report(entry, first, seed):
    """Answers drawn by lot, and what statistics says of them."""
    rng = np.random.default_rng(seed)
    asked = {f"kv.{size}": size for size in (2, 4, 6)} | {"knowledge": 2, "mqar.8": 4, "mqar.16": 6}
    answers = {task: (rng.random(40) < 1 / n + 0.08 * seed).astype(float) for task, n in asked.items()}
    answers["perplexity"] = 2 + rng.random(40)
    pairs = {task: (first[task], found) for task, found in answers.items()} if first else {}
    results = {task: proportion(found) for task, found in answers.items() if task != "perplexity"}
    loss = mean(answers["perplexity"])
    report = ModelReport(
        description=entry.description, plan=entry.plan, kv={str(n): results[f"kv.{n}"] for n in (2, 4, 6)},
        knowledge=results["knowledge"], perplexity=Perplexity(value=float(np.exp(loss.value)), loss=loss),
        tasks={task: found for task, found in results.items() if task.startswith("mqar")},
        cost=tuple(Cost(context=t, milliseconds=1 + t / 64 + seed, cache_bytes=1000 * t) for t in (64, 128)),
        speed=(
            Speed(context=64, batch=1, prefill_milliseconds=3, decode_milliseconds=1, cache_bytes=64, peak_bytes=2**20),
            Speed(context=4096, batch=1, prefill_milliseconds=9, decode_milliseconds=1, cache_bytes=64, peak_bytes=2**22),
        ),
        change={task: difference(a, b) for task, (a, b) in pairs.items()}, evidence=evidence(pairs),
    )  # fmt: skip
    return report, answers


@pytest.fixture(scope="module")
def measured(entries, tokenizer):
    """(report, ranking, matrices). Only the matrices are measured."""
    models, first = {}, None
    for seed, (name, entry) in enumerate(entries.items()):
        models[name], answers = model_report(entry, first, seed)
        first = first or answers
    made = provenance(EVIL, "f" * 64, 3, {"model": EVIL})
    rng = np.random.default_rng(0)
    scores = ("ablation_loss", "splice_gain", "splice_loss", "attribution", "answer_mass", "pair_mass")
    heads = [
        Score(site=Site(layer, (head,)), kind="ssm", role="gather", **{name: mean(rng.normal(size=9)) for name in scores})
        for layer in range(3)
        for head in range(8)
    ]
    zero = mean(np.zeros(3))
    probe = {"name": "kv", "options": {"pairs": 4}, "seed": 3}
    ranking = Ranking(
        provenance=made, probe=probe, base_accuracy=proportion(np.ones(3)), base_loss=zero, heads=tuple(heads[::-1]), layers=()
    )
    report = Report(provenance=made, plan=PLAN, models=models, timings={"bench": 1.0}, training={"x": {"kl": 0.5}}, settings={})
    return report, ranking, mixing(entries, tokenizer, short_question(tokenizer, "kv", {"pairs": 6}, 3), made)


@pytest.fixture(scope="module")
def page(measured):
    return html.render(*measured)


def test_everything_is_in_it_and_nothing_else_is_asked_for(page, measured):
    report, ranking, matrices = measured
    text = escaping.unescape(re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]+>", " ", page, flags=re.S))
    for name, model in report.models.items():
        assert name in text
        for result in model.kv.values():
            assert f"{result.accuracy:.3f} [{result.ci95[0]:.3f}, {result.ci95[1]:.3f}]" in text
    for title in ("In short", "Retrieval", "Controls", "The atlas of heads", "Speed and memory", "Provenance"):
        assert f"{title}" in text, title
    change = report.models["spliced"].change["kv.6"]
    said = [f"{100 * part:+.1f}".replace("-", "\N{MINUS SIGN}") for part in (change.value, *change.ci95)]
    assert f"That is {said[0]} points [{said[1]}, {said[2]}]" in text
    assert {str(score.site) for score in ranking.heads} <= set(re.findall(r">(L\d\.H\d)</option>", page))
    pictures = sum(len(panel.views()) for panel in matrices.panels)
    assert page.count('<figure class="mixing"') == pictures == 4
    assert page.count("<script>") == 1  # what a name says stays text
    assert EVIL in text
    assert "Splice attribution (ranks heads) nats per unit of gate" in re.sub(r"\s+", " ", text)
    # Nothing to load: no address but in what was escaped, no file, no style from elsewhere.
    assert not re.findall(r"<(?:link|iframe|object|embed|base)\b|@import|url\(|\bfetch\(|XMLHttpRequest", page)
    assert all(source.startswith("data:") for source in re.findall(r"<[^>]*\s(?:src|href)=[\"']?([^\"'>\s]+)", page))


def test_a_report_may_hold_less(measured):
    """No retrieval, no ranking or one of another model, no matrices, nothing to compare with; reports of earlier versions."""
    report, ranking, _ = measured
    alone = report.models["base"].model_copy(update={"kv": {}, "tasks": {}, "cost": (), "speed": ()})
    other = ranking.model_copy(update={"provenance": ranking.provenance.model_copy(update={"base_fingerprint": "0" * 64})})
    small = html.render(report.model_copy(update={"models": {"base": alone}, "plan": None}), other)
    for title in ("Retrieval</h2>", "The atlas of heads", "Mixing matrices before", "Controls</h2>", "Speed and memory"):
        assert title not in small
    first = report.models["base"]
    bare = html.render(
        report.model_copy(
            update={
                "models": {
                    "base": first,
                    "spliced": report.models["spliced"].model_copy(update={"kv": first.kv, "evidence": {}}),
                }
            }
        )
    )
    assert "not tested" in bare


def test_the_atlas_lays_many_heads_out(measured, monkeypatch):
    """More heads than can be pointed at: an image of all, cells for the leading ones; a row is best first."""
    original = measured[1]
    last = original.heads[-1]  # L0.H0, the only one with a role
    ranking = original.model_copy(update={"heads": (*(s.model_copy(update={"role": None}) for s in original.heads[:-1]), last)})
    monkeypatch.setattr(atlas_page, "MOST", 20)
    monkeypatch.setattr(atlas_page, "LEADERS", 10)
    monkeypatch.setattr(locating_atlas, "MOST_COLUMNS", 4)
    monkeypatch.setattr(locating_atlas, "SHARED_COLUMNS", 4)
    laid = atlas_page.atlas(ranking, PLAN)
    named = ranking.heads[:10] + tuple(score for score in ranking.heads[10:] if str(score.site) in ("L1.H2", "L1.H5", "L0.H0"))
    assert laid.left_out == len(ranking.heads) - 13 == 11
    assert [head.site for head in laid.heads] == [str(score.site) for score in named]
    assert [cell.letter for cell in laid.cells].count("G") == 1
    assert laid.shared
    rows = {layer: [score for score in ranking.heads if score.site.layer == layer] for layer in range(3)}
    columns = [0, 1, 2, 2, 3, 3, 3, 3]  # of the places within a layer
    for cell, score in zip(laid.cells, named, strict=True):
        column = columns[rows[score.site.layer].index(score)]
        assert (cell.x, cell.y) == (laid.gutter + atlas_page.CELL * column, atlas_page.CELL * score.site.layer)
        assert cell.grafted == (str(score.site) in ("L1.H2", "L1.H5"))
    for map, (name, _, _) in zip(laid.maps, locating_atlas.measured_maps(ranking), strict=True):
        picture = np.array(Image.open(io.BytesIO(base64.b64decode(map.png))))
        assert picture.shape == (3, 4, 4)
        largest = max((getattr(score, name).value for score in rows[1][2:4]), key=abs)
        assert locating_atlas.grid(ranking).values(ranking, name)[1, 2] == largest
    assert "data:image/png;base64," in html.render(measured[0], ranking)


def test_what_leaves_out_0_by_itself_alone_is_not_decided(measured):
    """A verdict never stands beside an interval that says otherwise, without a word about it."""
    report = measured[0]
    model = report.models["spliced"]
    said = model.evidence["kv.6"].model_copy(update={"p": 0.02, "p_holm": 0.4, "differs": False})
    change = model.change["kv.6"].model_copy(update={"value": 0.05, "ci95": (0.01, 0.09)})
    altered = {"evidence": {**model.evidence, "kv.6": said}, "change": {**model.change, "kv.6": change}}
    models = {**report.models, "spliced": model.model_copy(update=altered)}
    page = html.render(report.model_copy(update={"models": models}))
    assert '<span class="sign unknown" aria-hidden="true">?</span> perhaps better (p = 0.02 by itself, 0.4 among all' in page
    assert re.search(r"Of \d+ comparisons with the base:[^.]* \d+ not decided", page)


def test_matrices_are_those_of_the_models(measured, entries, tokenizer):
    _, _, matrices = measured
    assert Mixing.model_validate_json(matrices.model_dump_json()) == matrices
    ids = torch.tensor(tokenizer(short_question(tokenizer, "kv", {"pairs": 6}, 3).prompt)["input_ids"])
    assert len(ids) == len(matrices.tokens)
    for panel in matrices.panels:
        for name, weights in panel.models.items():
            exact = mixing_matrices(Subject.of(entries[name].model, tokenizer), ids, sites=[panel.site])[panel.site].abs()
            exact = (exact / exact.sum(-1, keepdim=True)).numpy()
            np.testing.assert_allclose(np.sqrt(weights.shares()), np.sqrt(exact), atol=0.5001 / 255)
            assert weights.answer == pytest.approx(exact[-1, list(matrices.answer)].sum(), abs=1e-5)
        assert panel.models["base"].rows != panel.models["spliced"].rows


def test_a_layer_is_shown_as_the_mean_of_its_heads(base, tokenizer, measured):
    plan = Plan(kind="layer", sites=("L1",))
    models = {"one": Entry(base, ""), "other": Entry(splice(base, plan), "", plan)}
    question = short_question(tokenizer, "kv", {"pairs": 6}, 3)
    (panel,) = mixing(models, tokenizer, question, measured[0].provenance).panels
    assert panel.heads["one"] == 8
    assert panel.models["other"].shares().sum(-1) == pytest.approx(1, abs=0.05)
    assert mixing({"one": Entry(base, "")}, tokenizer, question, measured[0].provenance) is None


def test_axes():
    look = looks(["a"])["a"]

    def laid(xs, y, **options):
        line = Series("a", look, tuple(Point(x, y, "") for x in xs))
        return chart(Figure("", "tokens", "tokens", "ms", (line,), **options))

    wide = laid((1, 2, 1000), 0.0)
    assert wide.x_label == "tokens (log scale)"
    assert len(wide.x_ticks) == 3
    assert next(label for _, label in wide.y_ticks) == "0"
    narrow = laid(range(1, 21), 0.5, top=1.0)
    assert len(narrow.x_ticks) < len(narrow.columns) == 20
    assert narrow.x_ticks[-1][1] == "20"
    assert [label for _, label in narrow.y_ticks] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert [label for _, label in laid((256, 300, 400, 4096), 1.0).x_ticks][-1] == "4,096"


def test_the_schema_says_what_report_json_holds(surgery, measured, tmp_path):
    status, printed, error = surgery("report-schema")
    assert status == 0, error
    schema = json.loads(printed)
    assert {*measured[0].model_dump(mode="json")} <= {*schema["properties"]}
    assert all(part["description"] for part in (schema, *schema["$defs"].values()) if "properties" in part)
    wrong = measured[0].model_dump(mode="json")
    wrong["models"]["base"]["kv"]["2"]["n"] = "many"
    (tmp_path / "report.json").write_text(json.dumps(wrong))
    with pytest.raises(UserError, match=r"report\.json: models\.base\.kv\.2\.n: .*integer"):
        Report.read(tmp_path / "report.json")


LOOK = """
const found = [];
for (const frame of document.querySelectorAll("iframe")) {
  const inside = frame.contentWindow, page = frame.contentDocument, all = (query) => [...page.querySelectorAll(query)];
  const fire = (target, kind, at = {}) => target.dispatchEvent(new inside.PointerEvent(kind, { bubbles: true, ...at }));
  const drawn = (svg) => svg.getBBox().width > 20 && svg.getBoundingClientRect().height > 20;
  const column = all(".column")[2];
  fire(column, "pointermove", { clientX: 90, clientY: 90 });
  const tip = page.getElementById("tip"), before = tip.hidden ? "" : tip.textContent;
  all(".legend button")[1].click();
  fire(column, "pointermove", { clientX: 90, clientY: 90 });
  const cell = page.querySelector('.cell[data-head="5"]');
  fire(cell, "pointerenter");
  const image = page.querySelector(".mixing img"), box = image.getBoundingClientRect();
  fire(image, "pointermove", { clientX: box.left + 2, clientY: box.bottom - 2 });
  const past = (one) => one.getBoundingClientRect().right > inside.innerWidth && !one.closest(".scroll, pre");
  const outside = all("body *").filter(past), scrolls = page.documentElement.scrollWidth > inside.innerWidth;
  found.push({
    errors: inside.errors, title: page.title,
    wide: [...outside.map((one) => one.tagName + one.textContent.slice(0, 40)), ...(scrolls ? ["the page"] : [])],
    asked: inside.performance.getEntriesByType("resource").map((one) => one.name),
    plots: all(".plot").map(drawn), maps: all(".map svg").map(drawn), images: all("img").map((one) => one.naturalWidth),
    tip: before, hidden: tip.textContent, chosen: page.getElementById("scores").textContent,
    marked: all(".cell.chosen").length, said: page.querySelector(".said").textContent,
    small: all("p, td, th, li, button").filter((one) => parseFloat(inside.getComputedStyle(one).fontSize) < 12).length,
  });
}
document.body.innerHTML = "<pre id=found></pre>";
document.getElementById("found").textContent = JSON.stringify(found);
"""
HOOK = """<script>window.errors = [];
for (const kind of ["error", "securitypolicyviolation", "unhandledrejection"])
  addEventListener(kind, (event) => errors.push(`${kind} ${event.message || event.blockedURI || event.reason}`), true);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: chromium)")
def test_in_a_browser(page, measured, tmp_path):
    report, ranking, matrices = measured
    hooked = escaping.escape(page.replace("<head>", f"<head>{HOOK}", 1))
    frames = "".join(f'<iframe srcdoc="{hooked}" style="width:{width}px;height:900px"></iframe>' for width in (1280, 360))
    (tmp_path / "frames.html").write_text(f"<body>{frames}<script>addEventListener('load', () => {{{LOOK}}});</script></body>")
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", (tmp_path / "frames.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    seen = json.loads(escaping.unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)[1]))
    assert len(seen) == 2
    for frame in seen:
        assert frame["errors"] == []
        assert [name for name in frame["asked"] if not name.startswith("data:")] == []
        assert frame["title"].startswith(EVIL)
        assert frame["wide"] == []
        assert frame["small"] == 0
        assert frame["plots"] == [True] * (2 + 2 + 3)  # retrieval of two probes, cost, speed
        assert frame["maps"] == [True] * 5
        assert frame["images"] == [len(matrices.tokens)] * 4
        result = report.models["spliced"].kv["6"]
        said = f"spliced: {result.accuracy:.3f} [{result.ci95[0]:.3f}, {result.ci95[1]:.3f}], n = {result.n}"
        assert frame["tip"].startswith("6 pairs")
        assert said in frame["tip"]
        assert said not in frame["hidden"]
        assert "base: " in frame["hidden"]
        score = ranking.heads[5]
        assert frame["chosen"].startswith(str(score.site))
        assert f"{score.splice_loss}".replace("-", "\N{MINUS SIGN}") in frame["chosen"]
        assert frame["marked"] == 5
        share = 100 * matrices.panels[0].models["base"].shares()[-1, 0]
        assert f"token {len(matrices.tokens)} " in frame["said"]
        assert f"draws {share:.1f}% from token 1 " in frame["said"]
