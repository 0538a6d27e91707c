"""Numbers in prose come from records: outside of what tools/fill_pages.py writes, README and the pages on evidence hold no
decimal and no percentage."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, name
from tools.fill_pages import PAGES

DOCS = ROOT / "docs"
PROSE = [
    ROOT / "README.md", DOCS / "index.md", *sorted((DOCS / "evidence").glob("*.md")), DOCS / "ideas" / "why.md",
    DOCS / "ideas" / "learnt.md", DOCS / "contributing" / "campaigns.md", DOCS / "contributing" / "history.md",
]  # fmt: skip
NUMBER = re.compile(r"(?<![\w.,])[+-]?\d*\.\d+(?![\w.])|\d+(?:\.\d+)?\s?%")
# Code, addresses, and numbers that name something: a paper, a version, a kind of interval.
NO_PROSE = re.compile(
    r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)|arXiv \d+\.\d+|(?:Python|[Vv]ersion) \d+\.\d+|\[\d+\.\d+(?:, \d+\.\d+)*\]|95%",
    re.M | re.S,
)


def loose(page: Path, text: str) -> list[str]:
    """The numbers of a page that are not filled in."""
    for part in PAGES.get(page, {}):
        text = re.sub(f"<!-- {re.escape(part)} -->.*?<!-- /{re.escape(part)} -->", "", text, flags=re.S)
    return NUMBER.findall(NO_PROSE.sub("", text))


@pytest.mark.parametrize("page", PROSE, ids=name)
def test_a_number_in_prose_is_of_a_record(page):
    assert loose(page, page.read_text()) == [], "fill them in from a record (tools/fill_pages.py), or leave them out"


def test_a_number_by_hand_is_seen():
    filled = "<!-- status -->\n0.5 of them\n<!-- /status -->\n"
    text = f"{filled}It gains .25, or 0.3 (+1.5 nats, 12%), in `x=0.1`, arXiv 2504.18574, version 0.7, [0.12]."
    assert loose(ROOT / "README.md", text) == [".25", "0.3", "+1.5", "12%"]
