"""python -m surgery"""

import os
import sys

# Python puts the current folder first, where a stranger's typer.py may lie. This package itself has been found already.
sys.path[:] = [place for place in sys.path if place and os.path.abspath(place) != os.path.abspath(os.curdir)]

from surgery.cli.app import main  # noqa: E402

if __name__ == "__main__":
    main()
