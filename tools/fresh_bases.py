"""Bases whose seeds were never used before: does `surgery run MODEL`, with nothing set, reach what recipes reach that were set
by hand for bases of their kind?

    python -m tools.fresh_bases FOLDER

FOLDER takes the bases and the runs; what is there already is not done again. Every base is trained by the recipe of a built-in
one, with another seed. All runs of a base ask the same questions. It writes recipes/fresh-bases.json, from which
tools/fill_pages.py fills docs/evidence/ways.md.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from surgery.evaluation.report import Report
from surgery.evaluation.results import ModelReport, value
from surgery.pretraining.pretrain import pretrain
from surgery.pretraining.recipe import read_pretrain_recipe
from surgery.records.names import is_control
from surgery.records.plan import Plan
from surgery.records.record import Environment, Record, Sealed, environment
from surgery.records.site import shortened
from surgery.runtime.progress import say
from surgery.statistics import Estimate, Proportion

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "recipes" / "fresh-bases.json"
CHOSEN = "MODEL"  # the run that chooses its recipe
SEEN, UNSEEN = "kv.64", "kv_unseen.64"
LIMIT = 300  # questions, as `surgery run MODEL` asks


@dataclass(frozen=True)
class Case:
    """A base: the recipe that trains it, its seed, and the recipes that were set by hand for bases of its kind."""

    base: str
    seed: int
    by_hand: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.base}-{self.seed}"


CASES = (
    Case("tiny-letters", 103, ("demo", "skills")),
    Case("tiny-mamba", 104, ("demo-mamba1", "letters-kept-mamba1")),
    Case("tiny-mamba2", 105, ("demo-mamba2", "demo-auto")),
    Case("tiny-mlstm", 106, ("seeds-mlstm",)),
)


class FreshRun(Record):
    """What a run came to: its plan, its hybrid's figures by task, their changes to the base's, and the best control at 64 pairs
    of keys used in tuning, of those that the run measured."""

    plan: str
    figures: dict[str, Proportion]
    change: dict[str, Estimate]
    control: Proportion | None


class FreshBase(Record):
    """A base's accuracy on dictionaries after pretraining, by pairs; and by task, with its runs by recipe. There are none where
    `surgery run MODEL` declines the base."""

    seed: int
    pretrained: dict[str, float]
    figures: dict[str, Proportion]
    runs: dict[str, FreshRun]


class FreshBases(Sealed, Environment):
    """bases: by the recipe that trained them."""

    bases: dict[str, FreshBase]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=[case.name for case in CASES], help="make this base's runs, and write no record")
    options = parser.parse_args()
    chosen = [case for case in CASES if options.only in (None, case.name)]
    reports = {case: runs_of(case, options.folder) for case in chosen}
    if options.only is None:
        bases = {case.base: fresh_base(case, options.folder, of) for case, of in reports.items()}
        RECORD.write_text(FreshBases(**environment().model_dump(), bases=bases).text())


def runs_of(case: Case, folder: Path) -> dict[str, Report]:
    """The reports by recipe; none of a base that is declined."""
    base = folder / "bases" / case.name
    if not (base / "measured.json").exists():
        training = read_pretrain_recipe(ROOT / "recipes" / f"{case.base}.yaml").model_copy(update={"seed": case.seed})
        say(f"training {case.name}")
        pretrain(training, base)
    reports = {}
    for recipe in (CHOSEN, *case.by_hand):
        out = folder / "runs" / f"{case.name}-{recipe}"
        if not (out / "report.json").exists():
            what = [base] if recipe == CHOSEN else [ROOT / "recipes" / f"{recipe}.yaml", *changes(base)]
            surgery("run", *what, "--out", out, "--resume")
        if recipe == CHOSEN and not out.exists():
            return {}
        reports[recipe] = Report.read(out / "report.json", unsealed="refuse")
    return reports


def changes(base: Path) -> list[str]:
    """Of a recipe that was set by hand: the base, and the same questions."""
    settings = (f"model={base}", "study=null", "seed=0", "bench.pairs=[64]", "bench.contexts=[]", f"bench.limit={LIMIT}")
    return [part for setting in settings for part in ("--set", setting)]


def surgery(*arguments: str | Path) -> None:
    """Raises SystemExit where it fails; status 1 is a finding: the base is declined, or the hybrid lost something."""
    command = [sys.executable, "-m", "surgery", *map(str, arguments)]
    say(" ".join(command[2:]))
    if (status := subprocess.run(command, check=False).returncode) not in (0, 1):
        raise SystemExit(status)


def fresh_base(case: Case, folder: Path, reports: dict[str, Report]) -> FreshBase:
    measured = json.loads((folder / "bases" / case.name / "measured.json").read_text())
    return FreshBase(
        seed=case.seed,
        pretrained={name: task["accuracy"] for name, task in measured.items() if name.startswith("kv.")},
        figures=figures(reports[CHOSEN].models["base"]) if reports else {},
        runs={name: fresh_run(of) for name, of in reports.items()},
    )


def fresh_run(report: Report) -> FreshRun:
    tuned = report.models["tuned"]
    controls = [of.results()[SEEN] for name, of in report.models.items() if is_control(name)]
    proportions = [of for of in controls if isinstance(of, Proportion)]
    return FreshRun(
        plan=_told(report.plan), figures=figures(tuned), change=tuned.change, control=max(proportions, key=value, default=None)
    )


def _told(plan: Plan | None) -> str:
    if plan is None:
        return ""
    return shortened(plan.sites) + ("" if plan.blend is None else f", gate {plan.blend:g}")


def behind_hand_set(runs: dict[str, FreshRun]) -> dict[str, float]:
    """By task, how much more the best recipe that was set by hand answers than the run that chooses its own."""
    by_hand = [run for name, run in runs.items() if name != CHOSEN]
    return {
        task: max(run.figures[task].accuracy for run in by_hand) - runs[CHOSEN].figures[task].accuracy
        for task in (SEEN, UNSEEN)
    }


def figures(model: ModelReport) -> dict[str, Proportion]:
    wanted = (SEEN, UNSEEN, "letters", "knowledge")
    return {name: of for name, of in model.results().items() if name in wanted and isinstance(of, Proportion)}


if __name__ == "__main__":
    main()
