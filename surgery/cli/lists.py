"""surgery report-schema, surgery tasks-path: what other programs read."""

import json

from surgery.more import TASKS


def report_schema() -> None:
    """Print the JSON schema of report.json.

    It says what every field means.

    Examples:
      surgery report-schema > report.schema.json
    """
    from surgery.evaluation.report import Report

    print(json.dumps(Report.model_json_schema(mode="serialization"), indent=2))


def tasks_path() -> None:
    """Print the folder of our lm-evaluation-harness tasks.

    They are this project's probes; the folder is for the harness's --include_path.

    Examples:
      surgery tasks-path
    """
    print(TASKS)
