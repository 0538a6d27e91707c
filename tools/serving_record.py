"""What a hybrid costs in vLLM beside its base, on this machine: recipes/serving.json, from which tools/fill_pages.py fills the
table in docs/howto/serve-vllm.md.

    python -m tools.serving_record ENVIRONMENT/bin/python

ENVIRONMENT has vLLM and this package (`make serving` makes one). Measured are checkpoints/tiny-mamba2 and that with the demo's
graft as it is spliced: tuning changes no cost.
"""

import argparse
from pathlib import Path

from surgery import bench, load, splice
from surgery.evaluation.report import Report
from surgery.records.recipe import Bench
from surgery.runtime.consent import consenting

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "recipes" / "serving.json"
CONTEXTS, CONCURRENCIES = (64, 1024), (1, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine_python")
    parser.add_argument("--cells", type=Path, help="a folder that keeps what is finished, for going on after an interruption")
    arguments = parser.parse_args()
    base = load(str(ROOT / "checkpoints/tiny-mamba2"))
    plan = Report.read(ROOT / "recipes" / "demo-mamba2.report.json").plan
    assert plan is not None
    options = Bench(suites=("serving",), contexts=CONTEXTS, concurrencies=CONCURRENCIES)
    with consenting(engine_python=arguments.engine_python):
        RECORD.write_text(bench(base, splice(base, plan), options=options, cells=arguments.cells).text())


if __name__ == "__main__":
    main()
