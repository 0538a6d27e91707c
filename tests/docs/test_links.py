"""Every link of README.md and docs/ leads somewhere, and the site builds without a warning."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.pages import PAGES, ROOT, name

LINK = re.compile(r"(?<!`)\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.M | re.S)
HEADING = re.compile(r"^#+ (.+)$", re.M)


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be linked to by."""
    text = CODE.sub(lambda code: "" if code[0].startswith("```") else code[0].strip("`"), page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if "://" in link:  # only its form: the tests have no network
            address = urlsplit(link)
            assert address.scheme == "https", link
            assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", address.netloc), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_file_of_the_repository_that_is_named_exists(page):
    text = page.read_text()
    shown = set(re.findall(r'title="([^"]+)"', text))  # examples that the reader is to write
    for file in re.findall(r"(?<![\w/.-])(?:recipes|checkpoints|surgery|kernels|tests|tools)/[\w./-]*\w", text):
        assert (ROOT / file).exists() or file in shown or any(f"{file}.py" == title for title in shown), file


@pytest.mark.slow  # that links and files are there, which most warnings are of, is seen above
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr  # with --quiet, mkdocs would not count them
    assert (tmp_path / "index.html").exists()
