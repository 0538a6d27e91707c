"""What torch and transformers read when they are imported; before anything imports them."""

import os

# One thread a process, those included that tests start: pytest-xdist runs one process a core, and threads that wait for each
# other beside other busy processes are many times slower than a single one.
os.environ["OMP_NUM_THREADS"] = os.environ.get("SURGERY_TEST_THREADS", "1")
# The processes that tests start may keep compiled modules. Otherwise each would compile again what pip has not compiled.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for the Hub is a mistake
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
