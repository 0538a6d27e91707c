"""The code of every page of the documentation runs as it stands, in the order of the page, in one folder a page.

Commands are made smaller (SMALLER) where they do not say how much they measure. Files that a page shows (blocks with a title)
are written first; those of the package are put where the package finds them.
"""

import importlib
import json
import random
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import surgery as toolkit
from surgery.families import families
from surgery.more.probes import ruler
from surgery.probes import probes
from surgery.records.recipe import Bench, Tune, read_recipe
from surgery.runtime import listing
from surgery.world.text import document
from tests.docs.pages import NOT_RUN, PAGES, Block, blocks, name
from tests.models import ROOT, TINY
from tests.surgery.test_help import understand

# Settings of a command that does not set them itself.
SMALLER = {
    "locate": {"locate.examples": "8", "locate.exact": "false", "locate.layers": "false"},
    "plan": {"plan.auto.examples": "8", "plan.auto.windows": "2", "plan.auto.skill_examples": "8", "plan.auto.steps": "1"},
    "prune": {"locate.examples": "4"},
    "tune": {"tune.steps": "2", "tune.batch_size": "2", "tune.text_batch_size": "1", "tune.skill_batch_size": "2"},
    "bench": {
        "bench.limit": "4",
        "bench.pairs": "[4,64]",
        "bench.unseen_pairs": "[]",
        "bench.contexts": "[16]",
        "bench.batches": "[1]",
        "bench.windows": "2",
    },
}
# Of a bench whose verdict has to come out as the page says.
JUDGED = {"bench.limit": "20", "bench.pairs": "[4,64]", "bench.contexts": "[64]", "bench.batches": "[1]", "bench.windows": "8"}
FULL = {"docs/quicktour.md"}  # runs as large as it stands, because it says what comes out
LARGE = {"README.md", *FULL}  # whose Python measures as much as it says
# And those whose commands are run on other pages, too, or in tests of their own.
SLOW = LARGE | {f"docs/howto/{page}.md" for page in ("bench", "ci", "cost", "export", "locate", "table", "tune", "your-model")}


# Of what is measured whatever a page says: questions of a look, tokens that RULER has written, and the seconds of a forward and
# of a step, and the examples, by which an estimate goes.
FEWER = {
    "commands.look.MOST": 12,
    "models.pace.SECONDS": 0.01,
    "costs.rehearsal.SECONDS": 0.01,
    "costs.counts.COUNTED": 64,
}
WRITTEN = 4


class SmallTune(Tune):
    """As SMALLER, where Python says no more than the steps."""

    batch_size: int = 2
    text_batch_size: int = 1
    skill_batch_size: int = 2


class SmallBench(Bench):
    """As SMALLER, where Python does not say how much it measures."""

    pairs: tuple[int, ...] = (4, 64)
    unseen_pairs: tuple[int, ...] | None = ()
    limit: int = 4
    contexts: tuple[int, ...] = (16,)
    windows: int = 2


LANGUAGES = {"bash", "python", "yaml", "json", "toml", "text", "bibtex"}
SHOWN = {"text", "bibtex"}  # neither run nor read
WITH_CODE = [page for page in PAGES if any(block.language not in SHOWN and block.reason is None for block in blocks(page))]


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """What commands have left in runs/: many pages begin with the same ones. The commands so far -> a copy."""
    return {}, tmp_path_factory.mktemp("saved")


@pytest.fixture
def workplace(tmp_path) -> Path:
    """The folder of a reader: the repository's models and recipes, a model of one's own, and three texts."""
    for folder in ("checkpoints", "recipes"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    shutil.copytree(TINY, tmp_path / "my-mamba2")
    for file, held_out in (("train.txt", False), ("unread.txt", False), ("held_out.txt", True)):
        rng = random.Random(file)
        (tmp_path / file).write_text("\n\n".join(document(rng, held_out=held_out) for _ in range(200)))
    return tmp_path


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Files of surgery/ that a page shows are found like the package's own, for as long as the page runs."""
    before = set(sys.modules)
    monkeypatch.setattr(listing, "ROOTS", (*listing.ROOTS, tmp_path / "surgery"))
    for package in (
        "more.probes",
        "more.families",
        "more.hybrids",
        "more.suites",
        "more.ways",
        "figures.views",
        "exporting.formats",
    ):
        module = importlib.import_module(f"surgery.{package}")
        monkeypatch.setattr(module, "__path__", [*module.__path__, str(tmp_path / "surgery" / package.replace(".", "/"))])
    yield
    for module in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]
    _look_again()


def _look_again() -> None:
    importlib.invalidate_caches()
    probes.cache_clear()
    families.cache_clear()


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=name(page), marks=[pytest.mark.slow] * (name(page) in SLOW)) for page in WITH_CODE]
)
def test_the_code_of_a_page_runs(page, surgery, workplace, saved, installed, monkeypatch):
    monkeypatch.setattr("surgery.evaluation.bench.Bench", SmallBench)
    if name(page) not in LARGE:
        make_smaller(monkeypatch)
    cells: dict = {"__name__": "page"}
    commands: list[str] = []
    for block in blocks(page):
        if block.title is not None:
            _write(workplace / block.title, block.text)
        if block.reason is not None:
            continue
        if block.language == "bash":
            for command in block.commands():
                _run(surgery, workplace, commands, command, saved, smaller=name(page) not in FULL)
        elif block.language == "python" and (block.title is None or block.title.startswith("tests/")):
            exec(compile(block.text, f"{name(page)}", "exec"), cells)
            for test in [value for key, value in cells.items() if key.startswith("test_") and block.title]:
                test()
        else:
            _read(workplace, block)
    if name(page) == "docs/quicktour.md":
        models = json.loads((workplace / "runs" / "look" / "bench" / "report.json").read_text())["models"]
        assert tuple(models) == ("base", "spliced", "tuned", "control_tuned")
        assert models["tuned"]["kv"]["32"]["accuracy"] > models["base"]["kv"]["32"]["accuracy"]


@pytest.mark.parametrize("page", [page for page in WITH_CODE if name(page) in SLOW], ids=name)
def test_the_commands_of_a_slow_page_are_understood(page):
    """And its Python can be compiled."""
    for block in blocks(page):
        if block.reason is None and block.language == "bash":
            for command in block.commands():
                understand(*shlex.split(command)[1:])
        elif block.reason is None and block.language == "python":
            compile(block.text, name(page), "exec")


def make_smaller(monkeypatch) -> None:
    """What Python measures in other pages than the large ones, the examples of locate included, and what no setting says."""
    own = toolkit.locate
    monkeypatch.setattr(toolkit, "locate", lambda base, **options: own(base, **options | {"examples": 8}))
    monkeypatch.setattr(toolkit, "Tune", SmallTune)
    for place, value in FEWER.items():
        monkeypatch.setattr(f"surgery.{place}", value)
    for task in ruler.WRITTEN:
        monkeypatch.setitem(ruler.WRITTEN, task, WRITTEN)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    _look_again()


def _run(surgery, workplace: Path, commands: list[str], command: str, saved, *, smaller: bool) -> None:
    """One command, or what the same one left behind the same ones before it."""
    program, verb, *arguments = shlex.split(command)
    assert program == "surgery", f"say why '{command}' is not run: <!-- not run: ... -->"
    known, folder = saved
    commands.append(command)
    if (key := (smaller, *commands)) in known:
        shutil.rmtree(workplace / "runs", ignore_errors=True)
        shutil.copytree(known[key], workplace / "runs")
        return
    settings = JUDGED if "--require" in arguments else SMALLER.get(verb, {})
    for setting, value in settings.items() if smaller else ():
        if not any(argument.startswith(f"{setting}=") for argument in arguments):
            arguments += ["--set", f"{setting}={value}"]
    status, _, err = surgery(verb, *arguments)
    assert status == 0, f"{command}\n{err}"
    if (workplace / "runs").exists():
        known[key] = folder / str(len(known))
        shutil.copytree(workplace / "runs", known[key])


def _read(workplace: Path, block: Block) -> None:
    """A file of data means something; a recipe is one."""
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "yaml" and "model" in yaml.safe_load(block.text):
        _write(workplace / "shown.yaml", block.text)
        read_recipe(workplace / "shown.yaml")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_block_says_what_it_is_and_why_it_is_not_run(page):
    text = page.read_text()
    assert {block.language for block in blocks(page)} <= LANGUAGES
    assert len(NOT_RUN.findall(text)) == sum(block.reason is not None for block in blocks(page))
    assert text.count("```") == 2 * len(blocks(page))


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
