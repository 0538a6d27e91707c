"""How near `surgery run --dry-run` comes to what then happens: python -m tools.estimate_check [--out FILE.json] [--only CASE]

Each case is estimated and run, each in a fresh process: the short demo, short recipes for built-in models, a Mamba-2 of
random weights in the shape of mamba2-130m, and a Falcon-Mamba-7B of random weights cut to a few layers. Ratios are estimate
over actual, by stage and in all.
--quick takes shorter recipes and a narrow 7B, for a look at the script. --clock cpu compares with the processor time of the run
and its child processes instead of the time, with one thread, for a machine that does other work: estimates are of the work
alone. --only measures these cases and leaves the others on record.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from surgery.records.record import Environment, Record, environment

ROOT = Path(__file__).parent.parent
LAYERS = 6  # of the 7B
TIME, MEMORY = 1.5, 0.15  # what an estimate may be off: the factor of the time, either way, and the share of the memory

SHORT: dict[str, Any] = {
    "locate": {"options": {"pairs": 10}, "examples": 32, "batch_size": 8, "exact": False},
    "tune": {
        "steps": 12, "batch_size": 4, "text_batch_size": 2, "text_tokens": 128,
        "lessons": [{"probe": "kv", "options": {"pairs": [4, 20]}}],
    },
    "bench": {"pairs": [5, 20], "limit": 64, "windows": 8, "window": 256, "contexts": [256, 1024], "batch_size": 16},
}  # fmt: skip
QUICK: dict[str, Any] = {
    "locate": SHORT["locate"] | {"examples": 16},
    "tune": SHORT["tune"] | {"steps": 6},
    "bench": SHORT["bench"] | {"limit": 32, "contexts": [256], "random_sites": 1},
}
BUILT_IN = SHORT | {"locate": SHORT["locate"] | {"exact": None}, "bench": SHORT["bench"] | {"random_sites": 1}}
CASES: dict[str, dict[str, Any]] = {
    "demo": {},
    **dict.fromkeys(("tiny-mamba2", "tiny-mamba", "tiny-deltanet", "tiny-mlstm"), BUILT_IN),
    "mamba2-130m": SHORT | {"plan": {"sites": ["L8.H3,5"]}},
    "falcon-mamba-7b, 6 layers": SHORT | {"plan": {"sites": ["L3.H0,1,2,3"]}, "bench": SHORT["bench"] | {"random_sites": 1}},
}


class Compared(Record):
    """seconds and bytes: [estimate, what happened], and the ratio of the two."""

    seconds: tuple[float, float]
    seconds_ratio: float
    memory: tuple[int, int]
    memory_ratio: float


class Case(Record):
    """stages: by name. whole: the sum of their times and the most of their memory. took: seconds of the estimate itself.
    environment, clock: what it was measured with and by, if that is not what the whole record says."""

    recipe: dict[str, Any]
    tried: str
    stages: dict[str, Compared]
    whole: Compared
    took: float
    environment: Environment | None = None
    clock: str | None = None

    def holds(self) -> bool:
        """Whether the whole is within the bounds."""
        return 1 / TIME <= self.whole.seconds_ratio <= TIME and abs(self.whole.memory_ratio - 1) <= MEMORY


class Check(Record):
    """estimates.json. clock: "wall", or "cpu" where a machine did other work."""

    environment: Environment
    clock: str
    quick: bool
    cases: dict[str, Case]


def check(names: list[str], clock: str, quick: bool) -> Check:
    """Estimate and run each case."""
    cases = {}
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            recipe = _recipe(name, Path(place), quick)
            estimated = _fresh("estimate", recipe, clock)
            happened = _fresh("run", recipe, clock)
            cases[name] = _case(yaml.safe_load(recipe.read_text()), estimated, happened)
            print(_shown(name, cases[name]), flush=True)
    return Check(environment=environment(), clock=clock, quick=quick, cases=cases)


def _with_earlier(result: Check, out: Path) -> Check:
    """With the other cases that are on record, if they were measured on the same machine. Each keeps the version and the clock
    that it was measured with."""
    if not out.exists() or (earlier := Check.read(out)).quick != result.quick:
        return result
    if earlier.environment.machine != result.environment.machine:
        return result
    cases = {name: _dated(case, of) for of in (earlier, result) for name, case in of.cases.items()}
    return result.model_copy(update={"cases": {name: cases[name] for name in CASES if name in cases}})


def _dated(case: Case, of: Check) -> Case:
    return case.model_copy(update={"environment": case.environment or of.environment, "clock": case.clock or of.clock})


def _case(recipe: dict[str, Any], estimated: dict[str, Any], happened: dict[str, Any]) -> Case:
    stages = {stage["name"]: stage for stage in estimated["stages"]}
    names = [name for name in happened["timings"] if name in stages]
    assert len(names) == len(happened["timings"]), f"not estimated: {set(happened['timings']) - set(stages)}"
    pairs = {
        name: ((stages[name]["seconds"], happened["timings"][name]), (stages[name]["memory"], happened["memory"][name]))
        for name in names
    }
    seconds, memory = (list(zip(*column, strict=True)) for column in zip(*pairs.values(), strict=True))
    whole = _compared((sum(seconds[0]), sum(seconds[1])), (max(memory[0]), max(memory[1])))
    recipe = recipe | {"model": Path(recipe["model"]).name}
    compared = {name: _compared(*both) for name, both in pairs.items()}
    return Case(recipe=recipe, tried=estimated["tried"], stages=compared, whole=whole, took=round(estimated["took"], 1))


def _compared(seconds: tuple[float, float], memory: tuple[int, int]) -> Compared:
    return Compared(
        seconds=(round(seconds[0], 2), round(seconds[1], 2)), seconds_ratio=round(seconds[0] / max(seconds[1], 1e-9), 3),
        memory=memory, memory_ratio=round(memory[0] / memory[1], 3),
    )  # fmt: skip


def _shown(name: str, case: Case) -> str:
    lines = [f"{name} (the estimate took {case.took} s)"]
    for stage, each in (*case.stages.items(), ("in all", case.whole)):
        lines.append(
            f"  {stage:32} time {each.seconds[0]:8.1f} s of {each.seconds[1]:8.1f} s: {each.seconds_ratio:.2f}   "
            f"memory {each.memory[0] / 2**20:8.0f} MiB of {each.memory[1] / 2**20:8.0f} MiB: {each.memory_ratio:.2f}"
        )
    return "\n".join(lines)


def _recipe(name: str, place: Path, quick: bool) -> Path:
    """The case's recipe as a file, with its model."""
    if name == "demo":
        recipe = yaml.safe_load((ROOT / "recipes" / "demo-short.yaml").read_text())
        recipe["model"] = str(ROOT / recipe["model"])
        if quick:
            recipe["locate"]["examples"], recipe["tune"]["steps"], recipe["bench"]["limit"] = 64, 20, 128
            recipe["bench"]["contexts"] = [256]
    elif name.startswith("tiny-"):
        recipe = CASES[name] | {"model": str(ROOT / "checkpoints" / name)}
    else:
        recipe = CASES[name] | (QUICK if quick else {})
        recipe["model"] = str(_random_weights(name, place / name.partition(",")[0], quick))
    path = place / f"{name.partition(',')[0]}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def _random_weights(name: str, folder: Path, quick: bool) -> Path:
    """A folder of random weights in a published shape. They know nothing; they cost what the published ones cost."""
    from surgery.world.tokenizer import build_tokenizer
    from tools.bench_shapes import BASES
    from tools.published import cut, published
    from tools.random_weights import write

    if name in BASES:
        BASES[name]().save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
    else:
        config = cut(published(name.partition(",")[0]).config, layers=LAYERS, vocabulary=8192 if quick else None, narrow=quick)
        write(config, folder, dtype="bfloat16")
    return folder


def _fresh(what: str, recipe: Path, clock: str) -> dict[str, Any]:
    """What a process of its own says."""
    command = [sys.executable, "-m", "tools.estimate_check", "--child", what, str(recipe), "--clock", clock]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if clock == "cpu" else {}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | threads)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _child(what: str, recipe: Path, clock: str) -> dict[str, Any]:
    from surgery.costs.estimate import estimate
    from surgery.costs.run import run
    from surgery.records.recipe import read_recipe

    options = read_recipe(recipe)
    if what == "estimate":
        return json.loads(estimate(options, recipe.parent).model_dump_json())
    report = run(options, recipe.with_suffix(".out"), anyway=True)
    seconds = report.cpu if clock == "cpu" else report.timings
    return {"timings": {name: seconds[name] for name in report.timings}, "memory": report.memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=list(CASES), action="append")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_child(options.child[0], Path(options.child[1]), options.clock)))
        return
    result = check(options.only or list(CASES), options.clock, options.quick)
    if options.out:
        options.out.write_text(_with_earlier(result, options.out).text())
    if not all(case.holds() for case in result.cases.values()):
        raise SystemExit("not all estimates are within the bounds")


if __name__ == "__main__":
    main()
