"""What has to be said before torch and transformers are imported, and who imports them: processes that run tests."""

import os

# One thread a process, subprocesses included: pytest-xdist runs one process a core, and threads that wait for each other beside
# other busy processes are many times slower than none. Before torch is imported, which reads it.
os.environ["OMP_NUM_THREADS"] = os.environ.get("SURGERY_TEST_THREADS", "1")
# The processes that tests start read modules as they were compiled once. To compile them, which this would make each of them do
# of which pip has left none compiled (Makefile), takes longer than to run them.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
# Before transformers is imported, which reads this one.
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for the Hub is a mistake


def pytest_configure(config):
    """The process that hands tests out to others runs none, and they would wait for its imports."""
    hands_out = getattr(config.option, "numprocesses", None) and not config.option.collectonly
    if hasattr(config, "workerinput") or not hands_out:
        config.pluginmanager.import_plugin("tests.models")
