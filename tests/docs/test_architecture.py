"""docs/architecture.md: its table is the record's, and the way of measuring works."""

import json

from tools.architecture import AROUND, PAGE, RECORD, ROOT, fill, lines


def test_the_table_is_the_records():
    page = PAGE.read_text()
    assert fill(page, json.loads(RECORD.read_text())) == page
    assert "lines of the core" in page


def test_what_stands_around_the_core_is_what_the_page_says(tmp_path):
    part = PAGE.read_text().partition("### Around it")[2].partition("### Sizes")[0]
    assert [line.split("`")[1].rstrip("/") for line in part.splitlines() if line.startswith("| `")] == [*AROUND]
    (tmp_path / "a.py").write_text("1\n2\n")
    assert lines([tmp_path / "a.py", ROOT / "surgery" / "errors.py"]) > 2
