"""Trackers (TensorBoard, Weights & Biases, ...) through accelerate: the chosen ones get every record of the log."""

import json

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType

from surgery.errors import UserError
from surgery.records.recipe import Tune


def check_trackers(options: Tune) -> None:
    """Raise UserError for a tracker that does not exist or is not installed; accelerate ignores the latter silently."""
    for name in options.report_to:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise UserError(f"tune.report_to: there is no '{name}'; there are {', '.join(LOGGER_TYPE_TO_CLASS)}")
        if name in LoggerType.list() and name not in map(str, get_available_trackers()):
            raise UserError(f"tune.report_to: '{name}' is not installed: pip install {name.replace('_', '-')}")


def begin_trackers(accelerator: Accelerator, options: Tune, project: str) -> None:
    """Start the trackers with the settings of the run. They take numbers and strings only; other settings become JSON."""
    if options.report_to:
        settings = options.model_dump(mode="json")
        plain = {name: value if isinstance(value, int | float | str) else json.dumps(value) for name, value in settings.items()}
        accelerator.init_trackers(project, config=plain)


def finish_trackers(accelerator: Accelerator) -> None:
    """Close the trackers, but not by accelerate's end_training, which would also end the connection between processes."""
    for tracker in accelerator.trackers:
        tracker.finish()
