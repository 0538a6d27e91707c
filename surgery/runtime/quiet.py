"""bitsandbytes warns when it is imported (peft does, wherever it is installed) and at every call; nothing that a user of this
package could change. Its errors are still heard, and so is all of it where a program has set its level."""

import logging

_logger = logging.getLogger("bitsandbytes")
if _logger.level == logging.NOTSET:
    _logger.setLevel(logging.ERROR)
