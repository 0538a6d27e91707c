"""Other packages' messages that nothing a user of this package does could change."""

import logging
import os
import sys
import warnings


def hush_bitsandbytes() -> None:
    """It warns when it is imported (peft does, wherever it is installed) and at every call. Its errors are still heard, and so
    is all of it where a program has set its level."""
    logger = logging.getLogger("bitsandbytes")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)


def hush_transformers() -> None:
    """For the command line: no notes on GPU kernels that are missing or weights that stay in their files, no retries of a Hub
    that cannot be reached, and no bars beside ours. transformers is not imported for that: where it is not yet, it reads the
    environment when it is."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its profiler speaks of blocks that were there before
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # of a size of 0, which is refused in a line
    if "transformers.utils.logging" in sys.modules:
        from huggingface_hub.utils import logging as hub_logging
        from transformers.utils import logging as transformers_logging

        hub_logging.set_verbosity_error()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
    else:
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
