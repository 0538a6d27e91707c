"""What is not written by hand on README.md, docs/ and recipes/paper/README.md is what the records and the code say."""

import re

import pytest

import surgery
from surgery.evaluation.report import Report
from surgery.studies import Findings
from tests.models import ROOT
from tools import fill_pages, mixers_page


@pytest.mark.parametrize("page", fill_pages.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_filled_parts_are_up_to_date(page):
    assert fill_pages.filled(page) == page.read_text(), "run: python -m tools.fill_pages"


RECORDS = [
    (Report, fill_pages.DEMO, "demo"),
    (Report, fill_pages.MAMBA2, "demo-mamba2"),
    (Report, fill_pages.MAMBA1, "demo-mamba1"),
    *((Findings, path, path.name.partition(".")[0]) for path in (*mixers_page.files(), fill_pages.STATE)),
]


@pytest.mark.parametrize(("kind", "record", "recipe"), RECORDS, ids=[recipe for _, _, recipe in RECORDS])
def test_a_record_is_of_its_recipe(kind, record, recipe):
    from surgery.records.names import strip_paths
    from surgery.records.recipe import Recipe, read_recipe
    from surgery.records.sections.gone import gone_of

    # A key that is newer than a record had no other value than its default then. Records name no places. Whether blocks were
    # computed again changes no bit, and its default was another one until 0.8.
    written = strip_paths(kind.read(record).provenance.recipe)
    for key in ("checkpointing", "gradient_checkpointing"):
        assert written["tune"].pop(key, False) in (False, "auto")
    written["data"].setdefault("skills", [])  # before 0.20 no other skill of the base bounded anything
    if ways := (written["study"] or {}).get("ways"):  # those of settings that went are in the record alone
        written["study"]["ways"] = {way: tune for way, tune in ways.items() if not tune.keys() & gone_of("tune").keys()}
    measured = Recipe.model_validate(written)
    assert measured == Recipe.model_validate(
        strip_paths(read_recipe(ROOT / "recipes" / f"{recipe}.yaml").model_dump(mode="json"))
    )


def test_the_python_page_has_every_public_name():
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    assert set(re.findall(r"heading: surgery\.(\w+)", page)) == set(surgery.__all__)
