"""surgery report-schema, surgery tasks-path: what other programs read."""

import json

from surgery.evaluation.folders import TASKS


def report_schema() -> None:
    """Print the JSON schema of report.json, with what every field means."""
    from surgery.evaluation.report import Report

    print(json.dumps(Report.model_json_schema(mode="serialization"), indent=2))


def tasks_path() -> None:
    """Print the folder of this project's probes as tasks of lm-evaluation-harness, for its --include_path."""
    print(TASKS)
