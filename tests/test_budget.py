"""The project stays as small as budget.toml says."""

import tomllib

import pytest

from tools.architecture import ROOT, measure_path, measure_sizes

BUDGET = tomllib.loads((ROOT / "budget.toml").read_text())


@pytest.fixture(scope="module")
def sizes():
    return measure_sizes(ROOT)


@pytest.mark.parametrize("name", BUDGET["most"])
def test_size_is_at_most(name, sizes):
    assert sizes[name] <= BUDGET["most"][name]


@pytest.mark.parametrize("name", BUDGET["least"])
def test_size_is_at_least(name, sizes):
    assert sizes[name] >= BUDGET["least"][name]


def test_one_pass_of_the_main_job():
    measured = measure_path(ROOT)
    assert {name: measured[name] for name, most in BUDGET["path"].items() if measured[name] > most} == {}
