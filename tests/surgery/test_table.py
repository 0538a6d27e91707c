"""The table of papers: what stands in it, what is bold, and what of a cache is counted."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from surgery.errors import UserError
from surgery.evaluation.report import Report
from surgery.evaluation.results import Cost, ModelReport, Perplexity
from surgery.loading.digests import Conditions
from surgery.models.cache import cache_bytes, cache_parts, prefilled
from surgery.more import table as tables
from surgery.records.plan import Plan
from surgery.records.record import provenance
from surgery.records.site import Site
from surgery.splicing.splice import adopt, splice
from surgery.statistics import mean, proportion
from tests.models import BASES
from tests.surgery.stock_bases import CONFIGURATIONS, base_of

LENGTHS = (5, 16, 40)


def of(right: int, n: int = 100):
    return proportion(np.arange(n) < right)


def model(weights: str, **fields) -> ModelReport:
    where = Conditions(model=weights, tokenizer="t", dtype="float32", device="cpu", kernels={}, packages={}, code="c")
    return ModelReport.model_validate({"description": weights, "plan": None, "conditions": where, **fields})


def written(folder: Path, **models: ModelReport) -> Path:
    report = Report(
        provenance=provenance("base", "0" * 64, 0), plan=None, models=models, timings={}, training={}, settings={}
    )  # fmt: skip
    folder.mkdir()
    report.write(folder / "report.json")
    return folder


@pytest.fixture
def reports(tmp_path):
    """Two, of the same base: one with RULER, one with dictionaries and text."""
    needles = {"niah_single_1.1024": of(10), "niah_single_1.4096": of(0), "ruler_vt.1024": of(0), "ruler.1024": of(10, 200)}
    better = {"niah_single_1.1024": of(95), "niah_single_1.4096": of(0), "ruler.1024": of(95)}
    costs = (Cost(context=256, milliseconds=1, cache_bytes=2**20), Cost(context=1024, milliseconds=2, cache_bytes=2**20))
    wider = tuple(cost.model_copy(update={"cache_bytes": 3 * 2**20}) for cost in costs)
    nats = mean(np.array([1.0, 1.1, 0.9, 1.0]))
    first = written(
        tmp_path / "ruler", base=model("b", tasks=needles, cost=costs, parameters=1_500_000),
        hybrid_1=model("h", tasks=better, cost=wider),
    )  # fmt: skip
    second = written(
        tmp_path / "text", base=model("b", kv={"64": of(30)}), hybrid_1=model("other", kv={"64": of(36)}),
        control_tuned=model("c", kv={"64": of(29)}, perplexity=Perplexity(value=float(np.exp(1.0)), loss=nats)),
    )  # fmt: skip
    return [first, second / "report.json"]


def rows(text: str, group: str) -> list[list[str]]:
    block = text.partition(f"### {group}\n\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]


def test_models_of_several_reports_stand_in_one_table(reports):
    report = tables.read(reports)
    assert list(report.models) == ["base", "hybrid_1", "text hybrid_1", "control_tuned"]  # base: the same weights
    text = tables.markdown(tables.columns(report.models), report.models)
    head, _, *body = rows(text, "RULER, 1,024 tokens")
    assert head == ["model", "S-NIAH-1", "VT", "all"]
    # Bold where intervals part; what was not measured is empty.
    assert body == [["base", "10.0", "0.0", "5.0"], ["hybrid_1", "**95.0**", "", "**95.0**"]]
    assert "No model is above chance in VT." in text
    assert "No model is above chance in any of these." in text.partition("### RULER, 4,096 tokens")[2]
    assert rows(text, "Dictionaries (key-value retrieval)")[2:] == [
        ["base", "30.0"], ["text hybrid_1", "36.0"], ["control_tuned", "29.0"],
    ]  # fmt: skip
    assert rows(text, "Size, memory and speed (batch 1)")[2] == ["base", "1.5", "**1**", "**1**", "2"]


def test_what_is_written(reports, tmp_path, surgery):
    status, out, err = surgery("table", *map(str, reports), "--out", str(tmp_path / "out"))
    assert status == 0, err
    assert "### Language" in out
    names = {path.name for path in (tmp_path / "out").iterdir() if path.name[0] != "."}
    assert names >= {"table.md", "table.tex", "table.csv", "ruler.png"}
    latex = (tmp_path / "out" / "table.tex").read_text()
    assert "hybrid\\_1 & \\textbf{95.0} &  & \\textbf{95.0} \\\\" in latex
    assert latex.count("\\begin{tabular}") == latex.count("\\end{tabular}") == 5
    cells = list(csv.DictReader((tmp_path / "out" / "table.csv").open()))
    (cell,) = [row for row in cells if (row["column"], row["model"], row["group"][:5]) == ("S-NIAH-1", "base", "RULER")][:1]
    assert (float(cell["value"]), int(cell["n"]), float(cell["chance"])) == (0.1, 100, 0.0)
    assert float(cell["low"]) < 0.1 < float(cell["high"])
    assert not [row for row in cells if row["value"] == ""]


def test_what_is_no_report_is_refused(tmp_path, surgery):
    (tmp_path / "report.json").write_text("{}")
    for path in (tmp_path, tmp_path / "none.json"):
        status, _, err = surgery("table", str(path))
        assert status == 2
        assert err.count("\n") == 1
    with pytest.raises(UserError, match="hold no results"):
        tables.columns({"base": model("b")})


def test_recall_against_memory_has_a_line_a_model(reports):
    figure = tables.memory_figure(tables.read(reports).models)
    assert [(line.name, [(p.x, p.y) for p in line.points]) for line in figure.series] == [
        ("base", [(1024.0, 0.05)]), ("hybrid_1", [(3072.0, 0.95)]),
    ]  # fmt: skip
    assert figure.result == "RULER, all tasks: hybrid 1 0.950 at 3,072 KiB, base 0.050 at 1,024 KiB"  # each where it ends


def tensors_in(thing, seen=None) -> dict[int, int]:
    """Place -> bytes, of all tensors that an object holds, however deep."""
    seen = {} if seen is None else seen
    if id(thing) in seen:
        return {}
    seen[id(thing)] = thing
    if isinstance(thing, torch.Tensor):
        return {thing.data_ptr(): thing.numel() * thing.element_size()} if thing.numel() else {}
    inner = thing if isinstance(thing, list | tuple) else getattr(thing, "__dict__", thing if isinstance(thing, dict) else {})
    inner = inner.values() if hasattr(inner, "values") else inner
    return {place: size for each in inner for place, size in tensors_in(each, seen).items()}


def formula(config, grafts: int, length: int) -> dict[str, int]:
    """The numbers that a Mamba-2 of this configuration holds of one sequence, with so many heads of one layer grafted: keys as
    wide as the state and one number more (the time step), and a convolution of their own."""
    layers, heads, state = config.num_hidden_layers, config.num_heads, config.state_size
    channels = heads * config.head_dim + 2 * config.n_groups * state
    numbers = {
        "keys": grafts * (state + 1) * length, "values": grafts * config.head_dim * length,
        "state": (layers * heads - grafts) * config.head_dim * state,
        "convolution": (layers * channels + 2 * grafts * state) * config.conv_kernel,
    }  # fmt: skip
    return {part: count for part, count in numbers.items() if count}


def plan_of(kind: str, width: int | None) -> Plan:
    return Plan(kind="layer", sites=(Site(1),)) if kind == "layer" else Plan(sites=(Site(1, (2, 3)),), width=width)


@pytest.mark.parametrize("name", [*BASES, *CONFIGURATIONS])
def test_bytes_of_a_cache_are_those_of_its_tensors_and_of_the_formula(name):
    """Of every family: as it is, with grafts of heads, and with one of a layer."""
    base = BASES[name]() if name in BASES else base_of(name)
    for kind in (None, "head", "layer"):
        model = adopt(base) if kind is None else splice(base, plan_of(kind, 8 if name in BASES else None))
        sizes = {}
        for length in LENGTHS:
            cache = prefilled(model, length, 2)
            assert cache_bytes(cache) == sum(tensors_in(cache).values()) > 0
            sizes[length] = cache_parts(cache)
            if base.config.model_type == "mamba2" and kind != "layer":
                numbers = formula(base.config, 2 if kind else 0, length)
                assert sizes[length] == {part: 2 * 4 * count for part, count in numbers.items()}
        if name in CONFIGURATIONS:
            continue  # whose own attention has keys, too
        for part in ("state", "convolution"):
            assert len({each[part] for each in sizes.values()}) == 1  # whatever the length
        for part in ("keys", "values"):
            assert (part in sizes[5]) is (kind is not None)
            assert [each.get(part, 0) * 5 for each in sizes.values()] == [sizes[5].get(part, 0) * n for n in LENGTHS]
