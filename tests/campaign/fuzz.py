"""Feeds the commands anything: spoilt recipes, settings, plans, rankings, patches, weights, configurations, tokenizers, texts,
facts, reports, and folders of earlier runs.

    python -m tests.campaign.fuzz [--quick]       # as often as it takes: it goes on where it was stopped
    python -m tests.campaign.fuzz --only 1234     # one of them again; its folder and what it said are kept

What must hold of each: it is refused with status 2 and a clear line, nothing is written; or it was good after all, and the
command ends well. No traceback, no end by a signal, nothing over 30 s (of the processor; 300 by the clock), at most a gibibyte
beyond what the process held.

Input number n of a seed is always the same. Each runs in a process that is forked from this one, which has imported everything.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import gc
import json
import random
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.campaign import trials

INPUTS, QUICK, SEED = 10_000, 300, 18
POOL_SEED = 5


def prepare(work: Path) -> Path:
    """Import everything, and make the good inputs. Returns their folder."""
    os.environ["HF_HOME"] = os.environ["HF_DATASETS_CACHE"] = str(work / "cache")
    import datasets
    import lm_eval.api.task
    import matplotlib.figure  # noqa: F401
    import peft
    import torch
    import transformers

    import surgery.cli.app
    import surgery.commands.comparison
    import surgery.commands.publish
    import surgery.commands.tune_hybrid
    import surgery.costs.estimate
    import surgery.costs.run
    import surgery.exporting.export
    import surgery.jobs.report_folder
    import surgery.jobs.run
    import surgery.pretraining.pretrain
    import surgery.studies.conduct
    import surgery.studies.prune_model
    from surgery.doctor.diagnosis import diagnose
    from surgery.exporting import verify
    from surgery.figures.views import atlas, mixing, results
    from surgery.kernels.dispatch import use
    from surgery.models.answers import load_and_answer
    from surgery.records.record import code_digest
    from surgery.runtime.quiet import hush_transformers
    from tests.campaign.materials import make

    assert all((datasets, lm_eval, peft, transformers, surgery))
    torch.set_num_threads(1)
    hush_transformers()
    diagnose()  # kernels are compiled and tried once, here

    def drawn(base: Any, ranking: Any, out: Path) -> None:
        """Figures take half of a run, and are none of its inputs' doing."""
        for name in ("atlas.png", "mixing.png"):
            (out / name).write_bytes(b"a picture")

    def ask(_: str, folders: Any, new: int) -> list[Any]:
        """An export is read back by the same lines, in this process: another would import everything again."""
        with use(**verify.KERNELS):
            return [load_and_answer(folder, how, min(new, 8)) for folder, how in folders.items()]

    atlas.located = mixing.located = drawn
    atlas.measured = mixing.draw_grafts = results.draw = lambda *_: None
    verify.ask = ask
    materials, made = work / "materials", work / "made"
    if not (made.exists() and made.read_text() == code_digest()):
        shutil.rmtree(materials, ignore_errors=True)
        make(materials)
        made.write_text(code_digest())
    gc.collect()
    gc.freeze()  # a child that collects would copy every page
    return materials


def lay_out(number: int, seed: int, work: Path, materials: Path, pool: list[Any]) -> tuple[Any, Path]:
    """Input `number`: the case, and the folder where it lies."""
    from tests.campaign.cases import KINDS, Bench

    rng = random.Random(f"campaign {seed} {number}")
    folder = work / "trials" / str(number)
    shutil.rmtree(folder, ignore_errors=True)
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    return kind(Bench(materials, folder, rng, pool)), folder


def one(number: int, seed: int, work: Path, materials: Path, pool: list[Any], keep: bool = False) -> trials.Line:
    """Run one input. Its folder is kept where something was wrong."""
    from surgery.records.record import code_digest
    from tests.campaign.trial import attempt

    case, folder = lay_out(number, seed, work, materials, pool)
    outcome = attempt(case.arguments, folder, case.statuses)
    line = {
        "number": number, "of": f"{case.kind}, {case.verb}", "kind": case.kind, "verb": case.verb, "code": code_digest(),
        "status": outcome.status, "seconds": outcome.seconds, "memory": outcome.memory, "failures": outcome.wrong,
    }  # fmt: skip
    if outcome.wrong or keep:
        told = line | {"arguments": case.arguments, "said": outcome.said, "printed": outcome.printed}
        folder.with_name(f"{number}.json").write_text(json.dumps(told, indent=1))
        print(f"see {folder.with_name(f'{number}.json')}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(folder.with_name(f"{folder.name}.log"), ignore_errors=True)
    return line


def record(results: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """What recipes/fuzz.json says. codes: digest of the package's sources -> how many inputs it met, if it was changed between
    calls of the campaign."""
    from surgery.records.record import environment

    def counts(chosen: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "inputs": len(chosen), "refused": sum(r["status"] == 2 for r in chosen),
            "accepted": sum(r["status"] in (0, 1) for r in chosen), "failures": sum(bool(r["failures"]) for r in chosen),
            "longest_processor_seconds": round(max(r["seconds"] for r in chosen), 2),
            "largest_bytes": max(r["memory"] for r in chosen),
        }  # fmt: skip

    def by(key: str) -> dict[str, Any]:
        return {name: counts([r for r in results if r[key] == name]) for name in sorted({r[key] for r in results})}

    codes = dict(Counter(r["code"] for r in results))
    tables = {"kinds": by("kind"), "verbs": by("verb")}
    return environment().model_dump() | {"seed": seed, "codes": codes, **counts(results), **tables}


def main() -> None:
    given = trials.options(__doc__, INPUTS, QUICK, SEED)
    work = (trials.ROOT / "runs" / "fuzz" / str(given.seed)).resolve()
    materials = prepare(work)
    from tests.campaign.mutations import arbitrary

    pool = arbitrary(POOL_SEED + given.seed)

    def trial(number: int) -> trials.Line:
        return one(number, given.seed, work, materials, pool, keep=given.only is not None)

    if lines := trials.conduct(trial, given, work / "results.jsonl"):
        trials.write_record(record(lines, given.seed), trials.ROOT / "recipes" / "fuzz.json")


if __name__ == "__main__":
    try:
        main()
    except SystemExit as stop:
        sys.stdout.flush()
        os._exit(int(stop.code or 0))  # without what extensions say of themselves when an interpreter ends
    sys.stdout.flush()
    os._exit(0)
