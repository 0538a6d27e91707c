"""Tables for a terminal. One that is too wide is shown in parts, each with the first column; no figure is broken in two."""

import sys

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from surgery.runtime.printable import printable

WIDTH = 80  # columns, where it is not known how many there are
WHOLE = 28  # a cell of at most so many characters is not broken
FRAME = 3  # columns that a column's border and blanks take


def print_table(header: list[str], body: list[list[str]]) -> None:
    """Print a table on standard output, as wide as the terminal."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for columns in parts(header, body, console.width):
        table = Table(*(Column(Text(printable(header[i])), width=width) for i, width in columns.items()))
        for row in body:
            table.add_row(*(Text(printable(row[i])) for i in columns))
        console.print(table)


def parts(header: list[str], body: list[list[str]], width: int) -> list[dict[int, int]]:
    """The parts that a table is shown in: the numbers of their columns, and how wide each is. A part is at most `width` wide,
    unless its first two columns alone need more."""
    columns = list(zip(header, *body, strict=True))
    least = [max(_narrowest(name, heading=True), *map(_narrowest, cells), 1) for name, *cells in columns]
    result = [{0: least[0]}]
    for i in range(1, len(columns)):
        if len(result[-1]) > 1 and _width(result[-1]) + least[i] + FRAME > width:
            result.append({0: least[0]})
        result[-1][i] = least[i]
    for part in result:  # what is left over goes to those that would take it, from the left
        for i in part:
            full = max(len(line) for cell in columns[i] for line in cell.split("\n"))
            part[i] += max(0, min(full - part[i], width - _width(part)))
    return result


def _width(part: dict[int, int]) -> int:
    return sum(part.values()) + FRAME * len(part) + 1


def _narrowest(cell: str, heading: bool = False) -> int:
    """How narrow a cell may become: headings and long texts are broken between words."""
    return max((len(piece) for piece in (cell.split() if heading or len(cell) > WHOLE else [cell])), default=0)
