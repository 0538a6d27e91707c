"""What mkdocs has to know about this repository: pages link to files outside of docs/, as they do on a code host.

A link such as ../../recipes/demo.retrieval.png leads out of docs/. Files of the kinds SHOWN are added to the site under
repository/, and links to them are turned there. The Markdown among them may lead on to others.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PLACE = Path("repository")
SHOWN = (".md", ".png", ".svg", ".yaml", ".json")
LINK = re.compile(r"(\]\()([^)\s#:]+)([^)\s]*\))")  # ](path#anchor), and no address of the web


def on_files(files: Files, *, config: Any) -> Files:
    """Add every file outside of docs/ that a page leads to, directly or through another such file."""
    waiting = [Path(str(file.abs_src_path)) for file in files if file.src_uri.endswith(".md")]
    while waiting:
        page = waiting.pop()
        for match in LINK.finditer(page.read_text()):
            target = (page.parent / match[2]).resolve()
            if target.suffix not in SHOWN or not target.is_file() or DOCS in target.parents or ROOT not in target.parents:
                continue
            if files.get_file_from_path(uri := place(target)) is None:
                files.append(File.generated(config, uri, abs_src_path=str(target), inclusion=InclusionLevel.NOT_IN_NAV))
                if target.suffix == ".md":
                    waiting.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Turn links to where their files are in the site. A link that leads nowhere stays, for mkdocs to complain about."""
    source = Path(page.file.abs_src_path)

    def turned(match: re.Match[str]) -> str:
        uri = place((source.parent / match[2]).resolve())
        if files.get_file_from_path(uri) is None:
            return match[0]
        return match[1] + os.path.relpath(uri, Path(page.file.src_uri).parent) + match[3]

    return LINK.sub(turned, markdown)


def place(path: Path) -> str:
    """Where a file of the repository is in the site."""
    if DOCS in path.parents:
        return path.relative_to(DOCS).as_posix()
    return (PLACE / path.relative_to(ROOT)).as_posix() if ROOT in path.parents else ""
