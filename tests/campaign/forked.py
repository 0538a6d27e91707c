"""A command of the toolkit in a forked process that has imported everything already."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Never


def become(arguments: Sequence[str], folder: Path, prepare: Callable[[], None]) -> Never:
    """Be `surgery ARGUMENTS` in a folder, and end with its status. prepare: is called there, before the command."""
    status = 1
    try:
        from surgery.cli.app import main

        os.chdir(folder)
        sys.argv = ["surgery", *arguments]
        prepare()
        main()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
