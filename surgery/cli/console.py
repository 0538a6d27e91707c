"""What the verbs print on standard output: lines and tables. Of several processes, only the main one prints."""

import sys

from surgery.runtime.processes import is_main


def show(text: str) -> None:
    """Print lines as they are."""
    if is_main():
        from rich.console import Console

        Console().print(text, highlight=False, markup=False, soft_wrap=True)


def table(header: list[str], body: list[list[str]]) -> None:
    """Print a table."""
    if not is_main():
        return
    from rich.console import Console
    from rich.table import Table

    grid = Table(*header)
    for row in body:
        grid.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(grid)
