"""The pages of the documentation, and the code in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r'(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.M | re.S,
)
NOT_RUN = re.compile(r"^<!-- not run\b", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block. title: the file that it is. reason: why it is not run; None if it is."""

    language: str
    text: str
    title: str | None
    reason: str | None

    def commands(self) -> list[str]:
        """The commands of a shell block, without comments; one that goes on behind a backslash is one."""
        lines = (line.split(" # ")[0].strip() for line in self.text.replace("\\\n", " ").splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [
        Block(match["language"], match["text"], match["title"], match["reason"]) for match in FENCE.finditer(page.read_text())
    ]


def name(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()
