"""python -m surgery"""

import contextlib
import os
import sys

# Python puts the current folder first, where a stranger's typer.py may lie. This package itself has been found already.
with contextlib.suppress(FileNotFoundError):  # the folder is gone
    sys.path[:] = [place for place in sys.path if place and os.path.abspath(place) != os.getcwd()]

from surgery.cli.app import main

if __name__ == "__main__":
    main()
