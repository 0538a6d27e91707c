"""The parts of README.md, docs/ and recipes/paper/README.md that are not written by hand: python -m tools.fill_pages

What was measured comes from the records that the commands wrote, what the code says of itself from the code
(tools/reference_parts.py). In a page, such a part is between <!-- NAME --> and <!-- /NAME -->.

Records: recipes/demo.report.json (`make demo` writes it to runs/demo/report.json), recipes/demo-mamba1.report.json (likewise,
`surgery run recipes/demo-mamba1.yaml`), and demo-auto, books and lengths in the same way,
recipes/kills.json and recipes/fuzz.json (`make campaign`), recipes/serving.json (`python -m tools.serving_record`),
recipes/gguf.json (`python -m tools.gguf_record`), recipes/mlx.json (`python -m tools.mlx_record`),
recipes/full-size.json (`python -m tools.full_size`),
recipes/kernels.bench.json (`python -m tools.bench_kernels`) and NAME.findings.json in recipes and
recipes/paper (`surgery run recipes/paper/NAME.yaml` writes findings.json and figure.png to runs/NAME).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from surgery.doctor.diagnosis import describe
from surgery.evaluation import markdown
from surgery.evaluation.automatic import automatic_choices, rounds
from surgery.evaluation.judgement import did_it_help
from surgery.evaluation.report import Report
from surgery.evaluation.results import NEEDLES, needle_tasks, value
from surgery.exporting.engines import EngineProof
from surgery.more import table as tables
from surgery.runtime import memory
from surgery.studies import Findings, studies
from surgery.studies.cohort import KNOWLEDGE, OF, SAME_LAYER, TEXT, headline
from surgery.studies.cohort import LETTERS as LETTERED
from surgery.studies.state_size import summarise
from surgery.studies.windows import summarise as windows_told
from tools import books_page, campaign_page, claims_page, costs_page, mixers_page, reference_parts, unseen_words, ways_page
from tools.bench_kernels import Benchmark, cell_rows
from tools.ruler_check import RulerCheck

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
EVIDENCE = DOCS / "evidence"
PAPER = ROOT / "recipes" / "paper"
DEMO = ROOT / "recipes" / "demo.report.json"
MAMBA2 = ROOT / "recipes" / "demo-mamba2.report.json"
AUTO = ROOT / "recipes" / "demo-auto.report.json"
LETTERS = {
    ROOT / "recipes" / "letters.report.json": "Without bounds: `plan.heads: auto`, `tune.steps: auto`",
    ROOT / "recipes" / "letters-choice.report.json": "Without bounds: `plan.by: choice` with hints and LoRA",
    ROOT / "recipes" / "letters-kept.report.json": "The second, within bounds",
    ROOT / "recipes" / "letters-kept-mamba1.report.json": "A Mamba-1, within bounds: `plan.heads: auto`",
}
SKILLS = ROOT / "recipes" / "skills.findings.json"
SHAPES = ROOT / "recipes" / "skills-shapes.findings.json"
UNBOUNDED = ROOT / "recipes" / "skills-unbounded.findings.json"
TARGET = ROOT / "recipes" / "letters-target.findings.json"
MAMBA1 = ROOT / "recipes" / "demo-mamba1.report.json"
KERNELS = ROOT / "recipes" / "kernels.bench.json"
KERNELS_BEFORE = ROOT / "recipes" / "kernels.before.json"  # an earlier version's, measured in the same way
AWARE = ROOT / "recipes" / "retrieval-aware.findings.json"
LONG = ROOT / "recipes" / "long.report.json"
WINDOWS = ROOT / "recipes" / "windows.findings.json"
WINDOWS_FOUR = ROOT / "recipes" / "windows-four.findings.json"
STATE = ROOT / "recipes" / "state-size.findings.json"
COHORT = ROOT / "recipes" / "cohort.findings.json"
COHORT_UNBOUNDED = ROOT / "recipes" / "cohort-unbounded.findings.json"
SEED2 = ROOT / "recipes" / "seed2.findings.json"
LENGTHS = ROOT / "recipes" / "lengths.report.json"
SERVING = ROOT / "recipes" / "serving.json"
GGUF = ROOT / "recipes" / "gguf.json"
MLX = ROOT / "recipes" / "mlx.json"

# In the order of the page: where miniature and paper agree, and where not.
VERDICTS = {
    "minimal-model": """\
**Agrees**: retrieval holds until one more layer is dropped, and then falls to chance at once. **Differs**: knowledge falls with
every layer, where the paper's knowledge tasks stay flat. Of four layers none is spare.""",
    "crucial-layers": """\
**Agrees**: the last two layers of the minimal model are crucial; one holds the gather head, the other the aggregate head.
**Differs**: with so few layers the first is needed as well, and dropping any layer costs knowledge.""",
    "crucial-heads": """\
**Agrees**: each of the two is worth nothing without the other, and both together, of eight heads, give retrieval far above
chance (1/16). **Differs**: they give only a part of it. Hints in pretraining decided where these heads are; the test is
that `locate` names them first.""",
    "kv-sweep": """\
**Agrees**: without the aggregate head retrieval falls with the number of pairs, without the gather head it is gone, and random
heads cost nothing. Measured in the minimal model: in the whole one, heads of the last layer replace a lost aggregate head.""",
    "mixing-matrices": """\
**Agrees**: the Transformer's gather head looks from each value at its key, its aggregate head from the question at one
summary, both sharply. The SSM's aggregate head, for which there was no hint, spreads over all summaries. **Differs**:
tiny-mamba2's convolution gathers before any head does, so ablating its gather head costs little.""",
    "delegation": """\
**Agrees**, and more sharply than in the paper: without attention at the query position retrieval is at chance and knowledge
stays. The hybrid was trained from scratch, without hints about where to retrieve. (The paper masks the last row; here the
mixers' output at the last position is set to zero, which also works for SSMs: `surgery/studies/prune.py`.)""",
    "replacement": """\
**Agrees**: one layer restores everything without training, and it is the layer of the donor's aggregate head. **Differs**: the
layer above does nearly as well, because the donor's heads there can replace that head. Of locate's measures on the SSM, splice
attribution names the right layer. The exact gains name its neighbour, the cost of ablation another.""",
}


def foreign_words() -> str:
    """Keys from outside the world."""
    record = claims_page.words()
    kinds = {"unseen": "unseen keys", "foreign": "other words", "capitals": "unseen keys, capitalised"}
    sizes = list(record.accuracy["base"]["unseen"])
    header = ["", *(f"{title}, KV {size}" for title in kinds.values() for size in sizes)]
    body = [
        [name, *(f"{accuracy[kind][size].accuracy:.3f}" for kind in kinds for size in sizes)]
        for name, accuracy in record.accuracy.items()
    ]
    n = record.accuracy["base"]["unseen"][sizes[0]].n
    return f"""{markdown.table(header, body)}

{n} questions a cell, seed {record.seed}. Measured {record.created[:10]} by version {record.toolkit} \
(`recipes/foreign-words.json`, which lists the words)."""


def _leading(report: Report) -> str:
    """A row a model: the largest dictionary, with keys used in tuning and others, and what the edit costs."""
    header, body = markdown.rows(report)
    sizes = [column for column in header if column.startswith("KV ")]
    letters = report.models["base"].letters
    skills = ["knowledge", *["letters"] * (letters is not None and letters.accuracy > 0.5)]  # others are at chance
    columns = [header.index(column) for column in ("model", *sizes[-2:], *skills, "perplexity")]
    return markdown.table([header[i] for i in columns], [[row[i] for i in columns] for row in body])


def demo() -> str:
    """The demo's whole table, and what its rows are."""
    report = Report.read(DEMO)
    described = "\n".join(
        f"- **{name}**: {model.description}" + (f" ({markdown.sites_text(model.plan)})" if model.plan else "")
        for name, model in report.models.items()
    )
    return f"""{_leading(report)}

{markdown.EXPLANATION} The figure has the other sizes.

{described}

{_measured(DEMO)}"""


def demo_mamba2() -> str:
    """The demo's rows on another base."""
    chosen = Report.read(MAMBA2).plan
    assert chosen is not None
    return f"""{_leading(Report.read(MAMBA2))}

The rows are those above, with grafts at {markdown.sites_text(chosen)}. {_measured(MAMBA2)}"""


def demo_auto() -> str:
    """The demo with heads, gate and steps found by measuring: the results, what was found, and what finding it took."""
    report = Report.read(AUTO)
    cells = rounds(report)
    assert cells is not None
    return f"""{_leading(report)}

{automatic_choices(report)}

{markdown.table(*cells)}

{_measured(AUTO)}

![Retrieval against dictionary size](../../recipes/demo-auto.retrieval.png)"""


def skills() -> str:
    """Bases that are each edited within bounds, and of one shape also without, beside grafts at other heads of the layer."""
    bounded, unbounded, shapes = (Findings.read(path) for path in (SKILLS, UNBOUNDED, SHAPES))
    body = []
    for record, name in ((each, name) for each in (bounded, shapes) for name in each.about):
        kept, free = _models_of(record, name), _models_of(unbounded, name)
        models = [kept["base"], free.get("tuned", {}), kept.get("tuned", {}), kept.get(SAME_LAYER, {})]
        cells = [f"{value(figures[task]):.3f}" if figures else "" for task in ("kv.64", LETTERED) for figures in models]
        changes = [f"{value(kept['tuned'][task]):+.3f}" if "tuned" in kept else "" for task in (KNOWLEDGE, TEXT)]
        body.append([name, *cells, *changes])
    columns = ("base", "unbounded", "within bounds", "other heads")
    header = ["", *(f"{task}, {column}" for task in ("KV 64", "letters") for column in columns), KNOWLEDGE, TEXT]
    made = [
        f"`recipes/{path.name}`: {record.provenance.created[:10]}, version {record.provenance.toolkit}, "
        f"{(record.provenance.recipe or {})['bench']['limit']} examples a cell"
        for path, record in ((SKILLS, bounded), (UNBOUNDED, unbounded), (SHAPES, shapes))
    ]
    stopped = [name for name in shapes.about if "stopped" in shapes.about[name]]
    no_plan = f" Of {' and '.join(stopped)} no plan kept the bounds." if stopped else ""
    return f"""{markdown.table(header, body)}

Measured on {bounded.provenance.machine}, one seed of locating and tuning a base ({"; ".join(made)}). Other heads: grafts at \
random other heads of the same layer, under the same gate, tuned alike. Changes are those of the edit within bounds.{no_plan}"""


def _models_of(record: Findings, base: str) -> dict[str, Any]:
    """Model of a base -> its figures, in the record of a cohort."""
    parts = ((*row.what.partition(OF), row.figures) for row in record.rows)
    return {model: figures for name, _, model, figures in parts if name == base}


def target() -> str:
    """Bases whose heads were located by letters, beside the same tuning without a graft and with grafts elsewhere."""
    told = Findings.read(TARGET)
    body = []
    for name in told.about:
        of = _models_of(told, name)
        models = ["base", "tuned", "control_tuned", "control_random_site_tuned", SAME_LAYER]
        cells = [f"{value(of[model][LETTERED]):.3f}" if model in of else "" for model in models]
        others = [f"{value(of[model]['kv.64']):.3f}" if model in of else "" for model in ("base", "tuned")]
        body.append([name, *cells, " to ".join(filter(None, others))])
    header = ["", "base", "edited", "no graft", "other layer", "other heads", "KV 64"]
    made, examples = told.provenance, told.rows[0].figures[LETTERED].n
    return f"""{markdown.table(header, body)}

{headline(told.about, told.rows)}

Share of {examples} lettered questions that is right (without an edit, of 1,000 when the base was trained). Measured \
{made.created[:10]} on {made.machine}, version {made.toolkit}, one seed of locating and tuning a base \
(`recipes/{TARGET.name}`). No graft, other layer, other heads: \
the same tuning without a graft, with grafts in another layer, and at other heads of the same one."""


def letters() -> str:
    """Two edits that take the letters, and two that keep them."""
    parts = []
    for path, title in LETTERS.items():
        report = Report.read(path)
        assert report.plan is not None
        named = f"**{title}** ({markdown.sites_text(report.plan)})"
        parts += [f"{named}. {did_it_help(report)}", markdown.table(*markdown.rows(report)), _measured(path)]
    return "\n\n".join(parts)


def _measured(path: Path) -> str:
    """When, where and on how much a report was measured."""
    report = Report.read(path)
    measured = report.provenance
    examples = next(iter(report.models["base"].kv.values())).n
    threads = f"{measured.threads} thread{'s' * (measured.threads > 1)}"
    return f"""Measured {measured.created[:10]} on {measured.machine} ({threads}), \
version {measured.toolkit}, \
seed {measured.seed}, {examples} examples a cell, {sum(report.timings.values()):.0f} seconds in all (`recipes/{path.name}`)."""


def mamba1() -> str:
    report = Report.read(MAMBA1)
    measured, chosen, recipe = report.provenance, report.plan, report.provenance.recipe
    assert chosen is not None
    assert recipe is not None
    examples = next(iter(report.models["base"].kv.values())).n
    return f"""{_leading(report)}

Grafted: {markdown.sites_text(chosen)}, behind a gate of {chosen.blend}; {recipe["tune"]["steps"]} steps. Measured \
{measured.created[:10]} on {measured.machine}, version {measured.toolkit}, seed {measured.seed}, {examples} examples a cell \
(`recipes/demo-mamba1.report.json`)."""


def kernels() -> str:
    benchmark, before = Benchmark.read(KERNELS), Benchmark.read(KERNELS_BEFORE)
    return f"""{markdown.table(*cell_rows(benchmark, before))}

Version {benchmark.environment.toolkit}, {describe(benchmark.environment)} (`recipes/kernels.bench.json`).

The last column is the same ratio in version {before.environment.toolkit}: {describe(before.environment)} \
(`recipes/kernels.before.json`)."""


def serving() -> str:
    """What base and hybrid cost in an engine, and where that was measured."""
    if not SERVING.exists():
        return "There is no record yet: `python -m tools.serving_record serving/bin/python` makes one."
    report = Report.read(SERVING)
    header, body = markdown.serving(report) or ([], [])
    made = report.provenance
    return f"""{markdown.table(header, body)}

{markdown.served(report)} Measured {made.created[:10]} on {made.machine}, version \
{made.toolkit} (`recipes/serving.json`)."""


def findings() -> str:
    """A section for every study: what was published, what was found here, and what to think of it."""
    sections = []
    for name, verdict in VERDICTS.items():
        result = Findings.read(PAPER / f"{name}.findings.json")
        origin, study = result.provenance, studies()[result.study]
        examples = (origin.recipe or {})["locate"]["examples"]
        sections.append(f"""## {study.title}

**Published.** {study.published}

**Here** ([{name}.yaml]({name}.yaml), `{origin.base}`). {result.summary}

{markdown.table(*studies()[result.study].table(result))}

![{study.title}]({name}.png)

{verdict}

Measured {origin.created[:10]} on {origin.machine}, version {origin.toolkit}, seed {origin.seed}, {examples} examples.""")
    return "\n\n".join(sections)


def seeds() -> str:
    """What the study of seeds says of each built-in base, the worst of all seeds."""
    parts = []
    for path in mixers_page.files():
        result = Findings.read(path)
        origin, rows = result.provenance, "\n".join(f"- {line}" for line in result.summary.splitlines())
        recipe = origin.recipe or {}
        last = recipe["seed"] + len({row.what.rpartition(" ")[2] for row in result.rows}) - 1
        limit = recipe["bench"]["limit"]
        parts.append(f"""`{origin.base}`, seeds {recipe["seed"]} to {last}, {limit} examples a cell, \
{origin.threads} thread, version {origin.toolkit}:

{rows}""")
    return "\n\n".join(parts) + "\n\n![Tuned on every seed anew](../../recipes/seeds.png)"


def retrieval_aware() -> str:
    """The study of heads that stay attention."""
    if not AWARE.exists():
        return "There is no record yet: `surgery run recipes/retrieval-aware.yaml` makes one."
    result = Findings.read(AWARE)
    origin, recipe = result.provenance, result.provenance.recipe or {}
    about, study = result.about, recipe["study"]
    table = markdown.table(*studies()[result.study].table(result)).replace("operated on", "grafted")
    return f"""{result.summary}

{table}

![{studies()[result.study].title}](../../recipes/retrieval-aware.png)

The Transformer's heads that were kept, in this order: {", ".join(about["chosen"])}; at random: {", ".join(about["random"])}; \
grafted: {", ".join(about["operated"])}. A head of the Transformer is as wide as {about["heads for each"]} of the \
converted model. Measured {origin.created[:10]} on {origin.machine}, {origin.threads} thread, version {origin.toolkit}, \
seed {origin.seed}, {recipe["bench"]["limit"]} examples a cell, {study["steps"]} steps of each mixer \
(`recipes/retrieval-aware.findings.json`)."""


def windows(path: Path = WINDOWS) -> str:
    """The study of windows against the cache."""
    name = path.name.partition(".")[0]
    result = Findings.read(path)
    origin, recipe = result.provenance, result.provenance.recipe or {}
    told = "\n".join(f"- {line}" for line in windows_told(result))
    return f"""{told}

{markdown.table(*studies()[result.study].table(result))}

![{studies()[result.study].title}](../../recipes/{name}.png)

`{origin.base}`; its groups in the order of windows: {", ".join(result.about["groups"])}. What is tuned takes \
{recipe["tune"]["steps"]} steps. {recipe["bench"]["limit"]} questions and {recipe["bench"]["windows"]} windows of text, \
intervals of 95%. Measured {origin.created[:10]} on {origin.machine}, {origin.threads} thread, version {origin.toolkit}, seed \
{origin.seed} (`recipes/{name}.findings.json`)."""


def state_size() -> str:
    """The study of the size of the state."""
    if not STATE.exists():
        return "There is no record yet: `surgery run recipes/state-size.yaml` makes one."
    result = Findings.read(STATE)
    origin, recipe, about = result.provenance, result.provenance.recipe or {}, result.about
    of, (whole, *sizes) = {row.what: row.figures for row in result.rows}, about["sizes"]
    lines = [summarise(size, of, about["cache bytes"], whole) for size in sizes]
    return f"""{chr(10).join(f"- {line}" for line in lines)}

![{studies()[result.study].title}](../../recipes/state-size.png)

`{origin.base}`, grafted at {", ".join(result.about["sites"])}, {recipe["tune"]["steps"]} steps of tuning. \
Measured {origin.created[:10]} on {origin.machine}, version {origin.toolkit}, seed {origin.seed}, \
{recipe["bench"]["limit"]} examples a cell (`recipes/state-size.findings.json`)."""


def cohort(path: Path = COHORT) -> str:
    """The main job on toy models trained without the layer-0 curriculum."""
    name = path.name.partition(".")[0]
    if not path.exists():
        return f"There is no record yet: `surgery run recipes/{name}.yaml` makes one."
    result = Findings.read(path)
    origin, recipe = result.provenance, result.provenance.recipe or {}
    size = max(int(pairs) for pairs in recipe["bench"]["pairs"])
    return f"""{headline(result.about, result.rows)} Accuracy at {size} pairs:

{markdown.table(*studies()[result.study].table(result))}

![{studies()[result.study].title}](../../recipes/{name}.png)

Measured {origin.created[:10]} on {origin.machine}, {origin.threads} thread{"s" * (origin.threads > 1)}, \
version {origin.toolkit}, seed {origin.seed}, {recipe["bench"]["limit"]} examples a cell \
(`recipes/{path.name}` has all sizes and intervals)."""


def cohort_unbounded() -> str:
    """What the same edits gain and cost where nothing bounds them."""
    record = Findings.read(COHORT_UNBOUNDED)
    body = []
    for name in record.about:
        base, tuned = (_models_of(record, name)[model] for model in ("base", "tuned"))
        accuracies = [f"{value(of['kv.64']):.3f}" for of in (base, tuned)]
        body.append([name, *accuracies, *(f"{value(tuned[change]):+.3f}" for change in (KNOWLEDGE, TEXT))])
    made, examples = record.provenance, record.rows[0].figures["kv.64"].n
    return f"""{markdown.table(["", "base", "tuned", KNOWLEDGE, TEXT], body)}

Accuracy at 64 pairs. Measured {made.created[:10]} on {made.machine}, version {made.toolkit}, seed {made.seed}, {examples} \
examples a cell (`recipes/{COHORT_UNBOUNDED.name}`), before letters were measured and anything was bounded."""


def lengths() -> str:
    """Needles in prompts longer than those of the training."""
    if not LENGTHS.exists():
        return "There is no record yet: `surgery run recipes/lengths.yaml` makes one."
    report = Report.read(LENGTHS)
    made, chosen = report.provenance, report.plan
    assert chosen is not None
    examples = (made.recipe or {})["bench"]["limit"]
    parts = []
    titles = ("A needle in the middle of a text", "One of several needles", "Several needles, one after the other")
    titled = dict(zip(("needle", *NEEDLES), titles, strict=True))
    for family, tasks in needle_tasks(report.base.tasks).items():
        if len(tasks) == 1:
            continue
        header = [titled[family], *(f"{length:,} tokens" for length in tasks)]
        rows = [[name, *(f"{value(of.tasks[task]):.3f}" for task in tasks.values())] for name, of in report.models.items()]
        parts.append(markdown.table(header, rows))
    tables = "\n\n".join(parts)
    return f"""{tables}

![Accuracy on needles against the length of the prompt](../../recipes/lengths.png)

Grafted: {markdown.sites_text(chosen)}. Measured {made.created[:10]} on {made.machine}, version {made.toolkit}, \
seed {made.seed}, {examples} questions a cell (`recipes/lengths.report.json`)."""


def table_of(*names: str) -> str:
    """What `surgery table` prints of some records, and of which versions they are."""
    paths = [path for path in (ROOT / "recipes" / f"{name}.report.json" for name in names) if path.exists()]
    joined = tables.read(paths)
    made = [(path, Report.read(path).provenance) for path in paths]
    told = "; ".join(f"`recipes/{path.name}`: {of.created[:10]}, version {of.toolkit}, seed {of.seed}" for path, of in made)
    return f"""{tables.markdown(tables.columns(joined.models), joined.models)}
Measured on {made[-1][1].machine}. {told}."""


def long() -> str:
    """The table at 32,768 tokens, and what memory the process took for it."""
    (peak,) = Report.read(LONG).memory.values()
    return f"""{table_of("long")} Peak memory of the process, a batch of 8 included: {memory.size(peak)}."""


def ruler() -> str:
    """RULER's examples beside the harness's own."""
    record = RulerCheck.read(ROOT / "recipes" / "ruler.json")
    lengths = sorted({int(length) for counts in record.equal.values() for length in counts})
    (examples,) = {n for counts in record.equal.values() for n in counts.values()}
    packages = ", ".join(f"{name} {record.packages[name]}" for name in ("lm_eval", "wonderwords", "nltk"))
    return (
        f"The same, prompt and answers: {examples} examples of each of {len(record.equal)} tasks at "
        f"{' and '.join(f'{length:,}' for length in lengths)} tokens, made by the harness and here with {packages} and a novel "
        f"for the essays. Compared {record.created[:10]}, version {record.toolkit}, seed {record.seed} (`python -m "
        "tools.ruler_check`, `recipes/ruler.json`)."
    )


def hops(name: str) -> str:
    """The study of two hops on a base."""
    result = Findings.read(ROOT / "recipes" / f"{name}.findings.json")
    origin, recipe = result.provenance, result.provenance.recipe or {}
    return f"""{markdown.table(*studies()[result.study].table(result))}

![{studies()[result.study].title}](../../recipes/{name}.png)

`{origin.base}`, grafted at {
        "; ".join(f"{sites} ({model.removesuffix(', tuned')})" for model, sites in result.about["sites"].items())
    }. {recipe["tune"]["steps"]} steps of tuning, {recipe["bench"]["limit"]} questions a cell, \
seed {origin.seed}. Measured {origin.created[:10]} on {origin.machine}, version {origin.toolkit} \
(`recipes/{name}.findings.json`)."""


def mlx() -> str:
    """What mlx-lm answered."""
    return _proved(MLX)


def gguf() -> str:
    """What llama.cpp answered."""
    return _proved(GGUF)


def _proved(path: Path) -> str:
    line = EngineProof.read(path).line()
    return f"{line[0].upper()}{line[1:]} (`recipes/{path.name}`)."


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    README: {
        "picture": claims_page.picture,
        "output": claims_page.output,
        "mamba2-130m": claims_page.shape_of_130m,
        "status": claims_page.status,
    },
    EVIDENCE / "index.md": {"claims": claims_page.claims},
    EVIDENCE / "demo.md": {
        "demo": demo, "demo-mamba2": demo_mamba2, "demo-auto": demo_auto,
        "foreign-words": foreign_words,
    },
    EVIDENCE / "letters.md": {"letters": letters, "skills": skills, "target": target},
    EVIDENCE / "mixers.md": {"mixers table": mixers_page.table, "mamba-1 table": mamba1, "seeds": seeds},
    EVIDENCE / "cohort.md": {
        "cohort": cohort, "unbounded": cohort_unbounded, "seed-2": partial(cohort, SEED2), "unseen-words": unseen_words.page,
    },
    EVIDENCE / "lengths.md": {"lengths": lengths},
    EVIDENCE / "transformer.md": {"retrieval-aware": retrieval_aware},
    EVIDENCE / "state.md": {"state-size": state_size},
    EVIDENCE / "text.md": {
        "tiny-books": partial(books_page.card, "tiny-books"),
        "books": books_page.operation,
        "recall": books_page.recall,
        "tiny-names": partial(books_page.card, "tiny-names"),
        "recall-places": books_page.recall_places,
    },
    EVIDENCE / "ways.md": {
        "ways": ways_page.ways, "ways-cohort": ways_page.ways_cohort, "ways-prose": ways_page.ways_prose,
        "kept-unseen": ways_page.kept_unseen, "fresh-bases": ways_page.fresh_bases,
    },
    EVIDENCE / "table.md": {
        "table mamba2": partial(table_of, "demo-mamba2", "table"),
        "table needles": partial(table_of, "lengths", "table-needles"),
        "table books": partial(table_of, "books", "table-books"),
        "table long": long,
    },
    EVIDENCE / "hops.md": {"hops": partial(hops, "hops")},
    EVIDENCE / "windows.md": {"windows": windows, "windows four": partial(windows, WINDOWS_FOUR)},
    DOCS / "contributing" / "campaigns.md": {"kills": campaign_page.kills, "fuzz": campaign_page.fuzz},
    DOCS / "howto" / "table.md": {"ruler": ruler},
    DOCS / "howto" / "serve-vllm.md": {"serving table": serving},
    DOCS / "howto" / "serve-mlx-lm.md": {"mlx": mlx},
    DOCS / "howto" / "serve-llama-cpp.md": {"gguf": gguf},
    DOCS / "reference" / "kernels.md": {"kernel table": kernels},
    DOCS / "reference" / "verbs.md": {"verbs": reference_parts.verbs},
    DOCS / "reference" / "settings.md": {"settings": reference_parts.settings},
    DOCS / "reference" / "report.md": {"report": reference_parts.report},
    DOCS / "reference" / "costs.md": {
        "recipes": costs_page.recipes,
        "stages": costs_page.stages,
        "estimates": costs_page.estimates,
    },
    DOCS / "reference" / "probes.md": {"probes": reference_parts.probes_and_suites},
    PAPER / "README.md": {"findings": findings},
}  # fmt: skip


def filled(page: Path) -> str:
    """A page with every measured part as its record says."""
    text = page.read_text()
    for name, part in PAGES[page].items():
        before, start, rest = text.partition(f"<!-- {name} -->")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        assert end, f"{page} has no place for the {name}"
        text = f"{before}{start}\n\n{part()}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page))
