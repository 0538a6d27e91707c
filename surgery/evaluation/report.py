"""report.json: the results, with the table and the page that show them."""

import sys
from html import escape
from importlib import import_module
from textwrap import fill

from surgery.evaluation.judgement import did_it_help, heading
from surgery.evaluation.results import Results, value
from surgery.runtime.listing import listed
from surgery.statistics import written


class Report(Results):
    __doc__ = Results.__doc__

    def __repr__(self) -> str:
        """A table of the results, a row for each task and a column for each model, and in words whether it helped."""
        tasks = list(self.base.results())
        body = [[heading(task), *(written(value(model.results()[task])) for model in self.models.values())] for task in tasks]
        table = [["", *self.models], *body]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
            for row in table
        ]
        return "\n".join([*(line.rstrip() for line in lines), "", *map(fill, did_it_help(self).splitlines())])

    __str__ = __repr__

    def show(self) -> None:
        """In a notebook, the whole page (as report.html) in place; elsewhere, the table."""
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if getattr(shell, "kernel", None) is None:
            print(self)
            return
        from IPython.display import HTML, display

        render = import_module(listed("views")["page"]).render
        page = f'<iframe srcdoc="{escape(render(self))}" style="width: 100%; height: 45em; border: 0"></iframe>'
        display(HTML(page))
