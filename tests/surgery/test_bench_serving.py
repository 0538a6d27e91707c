"""The suite `serving`: what is asked of an engine, and how its answers reach the report. A script stands in for the engine's
Python; where vLLM is installed, it is asked itself (`make serving`)."""

import json
import os
import stat
from pathlib import Path

import pytest

from surgery import Plan, UserError, bench, load, splice
from surgery.evaluation import markdown
from surgery.evaluation.suites import check
from surgery.figures.views import page as html
from surgery.records.recipe import Bench, read_recipe
from surgery.runtime.consent import consenting
from surgery.serving.suites.serving import versions

ROOT = Path(__file__).parent.parent.parent
BASE = str(ROOT / "checkpoints/tiny-mamba2")
PYTHON = Path(os.environ.get("SURGERY_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
CELL = {
    "requests": 4,
    "new_tokens": 32,
    "tokens_per_second": 99.5,
    "first_token_milliseconds": 12.0,
    "token_milliseconds": 3.25,
}


@pytest.fixture(scope="module")
def pair():
    base = load(BASE)
    return base, splice(base, Plan(sites="L0.H2"))


@pytest.fixture
def python(tmp_path):
    """Answers with a cell for each context and concurrency, of a model with grafts another; and notes what it was asked."""
    program = tmp_path / "python"
    program.write_text(f"""#!/usr/bin/env -S python3
import json, sys
from pathlib import Path
job = json.load(sys.stdin)
with open({str(tmp_path / "asked")!r}, "a") as log:
    log.write(json.dumps(job) + "\\n")
packages = {{"vllm": "1.0", "torch": "9"}}
if job.get("only") == "versions":
    print(json.dumps(packages))
else:
    folder = Path(job["folder"])
    config = json.loads((folder / "config.json").read_text())
    hybrid = config["model_type"] == "mamba2_hybrid"  # a base is served as what it is
    assert hybrid == bool(config.get("grafts"))
    assert (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists()
    cells = [{CELL!r} | {{"context": c, "concurrency": n}} for c in job["contexts"] for n in job["concurrencies"]]
    print(json.dumps({{"packages": packages, "cache": {{"token": 256 * hybrid, "state": 2048, "needed": 99}}, "cells": cells}}))
""")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


OPTIONS = Bench(suites=("serving",), contexts=(16, 64), concurrencies=(1, 3))


def test_what_an_engine_measured_stands_in_the_report(pair, python, tmp_path):
    """And is not measured again where it is kept."""
    base, hybrid = pair
    with consenting(engine_python=python):
        report = bench(base, hybrid, options=OPTIONS, cells=tmp_path / "cells")
    measured = report["hybrid"].serving
    assert [(cell.context, cell.concurrency) for cell in measured] == [(16, 1), (16, 3), (64, 1), (64, 3)]
    assert [report[name].serving[0].cache_bytes_per_token for name in ("base", "hybrid")] == [0, 256]
    assert measured[0].packages == {"vllm": "1.0", "torch": "9"}
    assert str(tmp_path) not in report.model_dump_json()
    for page in (markdown.render(report), html.render(report)):
        assert "In a serving engine" in page
        assert "vllm 1.0, torch 9" in page
        for figure in ("99.5", "12 ms", "3.2 ms", "256 B", "2 KiB"):
            assert figure in page
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 3  # the versions, and each of the models
    with consenting(engine_python=python):
        again = bench(base, hybrid, options=OPTIONS, cells=tmp_path / "cells")
    assert again["hybrid"].serving == measured
    assert len((tmp_path / "asked").read_text().splitlines()) == 4  # the versions
    assert not any(Path(json.loads(line).get("folder", "/none")).exists() for line in asked)


def test_an_engine_is_named_before_anything_is_measured(pair, tmp_path):
    for suites, python, message in (
        (("serving",), None, "needs a Python that has vLLM and this package installed: --engine-python "),
        ((), "python", "--engine-python is for the suite serving"),
        (("serving",), tmp_path / "none", "--engine-python: there is no program"),
    ):
        with consenting(engine_python=python), pytest.raises(UserError, match=message):
            check(Bench(suites=suites) if suites else Bench())
        with consenting(engine_python=python), pytest.raises(UserError, match=message):
            bench(pair[0], options=Bench(suites=suites) if suites else Bench())


def test_no_recipe_and_no_setting_starts_a_program(tmp_path):
    """Only a flag of the command line, or the user's own Python."""
    (tmp_path / "recipe.yaml").write_text("model: base\nbench: {suites: [serving], engine_python: ./evil.sh}\n")
    for arguments in ((tmp_path / "recipe.yaml",), (None, ["model=base", "bench.engine_python=./evil.sh"])):
        with pytest.raises(UserError, match=r"bench.engine_python: went with version 0.20"):
            read_recipe(*arguments)


def test_what_an_engine_fails_with_is_one_line(pair, tmp_path):
    python = tmp_path / "python"
    for script, message in (
        ("#!/bin/sh\necho '{}'\n", "vllm is not installed for"),
        ("#!/bin/sh\necho nothing\n", "is to be a Python, and .* is none"),
        ("#!/bin/sh\necho 'x Value error, hybrids are not so served [type=v]' >&2; exit 1\n", ": hybrids are not so served$"),
    ):
        python.write_text(script)
        python.chmod(0o755)
        with pytest.raises(UserError, match=message) as raised:
            versions(python)
        assert "\n" not in str(raised.value)


@pytest.mark.vllm
@pytest.mark.skipif(not PYTHON.exists(), reason="no environment with vLLM: `make serving` makes one")
def test_vllm_is_measured_by_its_own_client(pair):
    """A page of vLLM's holds a block of keys and values, for which its SSM layers reserve as much."""
    with consenting(engine_python=PYTHON):
        report = bench(*pair, options=Bench(suites=("serving",), contexts=(32,), concurrencies=(2,)))
    (base,), (hybrid,) = (report[name].serving for name in ("base", "hybrid"))
    assert (base.cache_bytes_per_token, base.requests) == (0, 8)
    assert hybrid.cache_bytes_per_token > 0
    assert hybrid.state_bytes >= base.state_bytes > 0
    assert min(hybrid.tokens_per_second, hybrid.first_token_milliseconds, hybrid.token_milliseconds) > 0
