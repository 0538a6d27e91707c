"""What torch and transformers read when they are imported. Only processes that run tests import them."""

import os

# One thread a process, subprocesses included: pytest-xdist runs one process a core, and threads that wait for each other beside
# other busy processes are many times slower than a single one. Before torch is imported, which reads it.
os.environ["OMP_NUM_THREADS"] = os.environ.get("SURGERY_TEST_THREADS", "1")
# The processes that tests start may keep compiled modules (.pyc). Otherwise each would compile again whatever pip has not
# compiled (Makefile), which takes longer than to run it.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
# Before transformers is imported, which reads this one.
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for the Hub is a mistake


def pytest_configure(config):
    """The process of xdist that hands tests out runs none, and the others would wait for its imports."""
    hands_out = getattr(config.option, "numprocesses", None) and not config.option.collectonly
    if hasattr(config, "workerinput") or not hands_out:
        config.pluginmanager.import_plugin("tests.models")
