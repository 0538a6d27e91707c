"""Site, Plan and Recipe: round trips and refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surgery.errors import UserError
from surgery.records.plan import Plan, Start
from surgery.records.record import provenance, write_text
from surgery.records.site import Site
from surgery.runtime.ownership.files import put

sites = st.builds(Site, st.integers(0, 99), st.lists(st.integers(0, 9999), max_size=5).map(tuple))
grafted = st.builds(Site, st.integers(0, 99), st.lists(st.integers(0, 9999), min_size=1, max_size=5).map(tuple))


@given(sites)
def test_site_round_trip(site):
    assert Site.parse(str(site)) == site


def test_site_text():
    assert str(Site(36, (1906, 1565))) == "L36.H1565,1906"
    assert Site.parse("L17") == Site(17)


@pytest.mark.parametrize("text", ["", "17", "L1.H", "L-1", "L1.H1,,2", "l1.h2", "L1.H2;"])
def test_malformed_site_is_refused(text):
    with pytest.raises(UserError, match="is not a site"):
        Site.parse(text)


def with_starts(sites, starts, **options):
    """A plan whose heads begin with these starts."""
    heads = [str(head) for site in sites for head in site.each()]
    return Plan(sites=sites, starts=dict(zip(heads, starts, strict=False)), **options)


plans = st.builds(
    with_starts,
    sites=st.lists(grafted, min_size=1, max_size=4).map(tuple),
    starts=st.lists(st.builds(Start, sign=st.sampled_from([1, -1]), tau=st.floats(0.01, 9)), max_size=3),
    time_step=st.booleans(),
    width=st.none() | st.integers(1, 256),
    shared=st.booleans(),
    blend=st.none() | st.floats(0, 1),
    seed=st.integers(0, 2**31),
    provenance=st.none() | st.just(provenance("base", "0" * 64, 1, {"model": "m"})),
)


@given(plans)
def test_plan_round_trip(plan):
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_plan_merges_sites_of_a_layer():
    assert Plan(sites=("L2.H1", "L1.H6", "L1.H3")).sites == (Site(1, (3, 6)), Site(2, (1,)))


def test_write_is_atomic(tmp_path, monkeypatch):
    """A writer that dies on the way leaves the old content and no leftovers that look like the file."""
    target = tmp_path / "x.json"
    write_text(target, "old")
    monkeypatch.setattr("os.write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left"):
        put(target, b"new", own=b"old".__eq__)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
