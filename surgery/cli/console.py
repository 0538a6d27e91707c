"""What the verbs print on standard output: lines and tables. Of several processes, only the main one prints."""

from contextlib import AbstractContextManager

from surgery.runtime.printable import printable
from surgery.runtime.processes import is_main


def show(text: str) -> None:
    """Print lines as they are."""
    if is_main():
        from rich.console import Console

        Console().print(printable(text), highlight=False, markup=False, soft_wrap=True)


def prose(text: str) -> None:
    """Print sentences. On a terminal they are broken between words where they are too long."""
    if is_main():
        import textwrap

        from rich.console import Console

        console = Console()
        if console.is_terminal:
            text = textwrap.fill(text, console.width, break_long_words=False, break_on_hyphens=False)
        console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def starting() -> AbstractContextManager[None]:
    """While a verb's packages are imported, which takes seconds."""
    from surgery.runtime.progress import busy

    return busy("starting", after=None)


def table(header: list[str], body: list[list[str]]) -> None:
    """Print a table, in parts where it is wider than the terminal."""
    if is_main():
        from surgery.cli.tables import print_table

        print_table(header, body)
