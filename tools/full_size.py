"""The job on random weights in the full shape of a published model, stage by stage: each in a process of its own, whose peak
memory and time go into a record.

    python -m tools.full_size falcon-mamba-7b --work /a/large/disk

Stages: write (the folder of weights), load, locate, plan, splice, tune, export-patch, export-hf, bench, with few questions and
steps. If they are named: run, the whole `surgery run` with all controls, with as few; estimate, what `surgery run --dry-run`
says of the recipe as it is; recipe, the recipe as it is. A stage that is on record with the same code, sizes and arguments is
not repeated, so the script may be stopped at any time; what a stage needs and is no longer there is made again. --layers,
--vocabulary and --narrow cut the model, for trying this out: such stages go into WORK/full-size.json.

Memory: tools/peak_memory.py says what is counted. Time: wall time, and processor time, which other work on the machine does not
prolong. Disk: three times the weights.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

from surgery.errors import UserError
from surgery.records.record import environment
from tools.full_size_record import GIB, Foretold, FullSize, Stage
from tools.peak_memory import measure
from tools.published import Published, cut, is_original, names, published

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "recipes" / "full-size.json"
LIMIT = 20 * GIB  # of a stage, on a machine of 24 GiB
# Fewer of everything, so that a 7B model passes on two cores in half an hour: memory hangs on the sizes of batches, and not on
# how many there are.
QUESTIONS = ["locate.examples=2", "locate.batch_size=2", "locate.options.pairs=4"]
TEXTS = ["data.train_text=world", "data.held_out_text=world"]
STEPS = [
    "tune.steps=10", "tune.batch_size=1", "tune.lessons=[{probe: kv, options: {pairs: 40}, queries: 8}]",
    "tune.text_batch_size=1", "tune.text_tokens=256", "tune.gradient_accumulation_steps=1",
]  # fmt: skip
# A whole run tunes several models, and what it holds does not grow after the second step. With "auto" it would keep what
# fits into the memory that happens to be free: here it is to say how little it can do with.
FEWER = ["tune.steps=2", "tune.gradient_checkpointing=true"]
NAMED = ("run", "estimate", "recipe")  # stages that are done only if they are named
MEASURED = [
    "bench.limit=8", "bench.pairs=[4]", "bench.unseen_pairs=[]", "bench.windows=2", "bench.window=256", "bench.contexts=[256]",
]  # fmt: skip
ABLATED = ["locate.exact=0.001"]  # where there is no attribution: each layer, and a few heads


class Step(NamedTuple):
    """How a stage is done, in the folder of the model. arguments: of Python. needs: stages whose folders it reads. makes: what
    it writes. frees: folders that nothing needs after it. whole: its limit is that of a whole run."""

    arguments: list[str]
    needs: tuple[str, ...] = ()
    makes: str = ""
    frees: tuple[str, ...] = ()
    whole: bool = False


def steps(name: str, dtype: str, grafted: bool = True, apart: bool = False) -> dict[str, Step]:
    """By stage. apart: the model's folder brings no tokenizer."""
    recipe = str(recipe_of(name))
    words = ["tokenizer=model/tokenizer"] if apart else []
    opening = ["--recipe", recipe, *_set(f"dtype={dtype}", *words)]

    def surgery(verb: str, *arguments: str, needs: tuple[str, ...] = ("write",), out: str, **more: Any) -> Step:
        return Step(["-m", "surgery", verb, *arguments, "--out", out], needs, out, **more)

    loads = f"from surgery import load; load('model', tokenizer={'model/tokenizer' if apart else None!r}, dtype={dtype!r})"
    result = {"load": Step(["-c", loads], ("write",))}
    if not grafted:
        return result | {"locate": surgery("locate", "model", *opening, *_set(*QUESTIONS, *ABLATED), out="located")}
    measuring, tuning = _set(*TEXTS, *MEASURED), _set(*TEXTS, *STEPS)
    attributed = _set(*QUESTIONS, "locate.exact=false")
    given = _set("model=model", f"dtype={dtype}", *words)
    whole = ["run", recipe, *given, *_set(*TEXTS)]
    return result | {
        "locate": surgery("locate", "model", *opening, *attributed, out="located"),
        "plan": surgery("plan", "located/ranking.json", "--recipe", recipe, needs=("locate",), out="plan.json"),
        "splice": surgery("splice", "model", "plan.json", *opening, needs=("write", "plan"), out="spliced"),
        "tune": surgery(
            "tune", "spliced", *opening, *tuning, needs=("write", "splice"), out="tuned", frees=("spliced", "tuned-tuning")
        ),
        "export-patch": surgery("export", "tuned", "--format", "patch", needs=("write", "tune"), out="patch"),
        "export-hf": surgery("export", "tuned", "--format", "hf", needs=("tune",), out="exported", frees=("exported",)),
        "bench": surgery("bench", "model", "patch", *opening, *measuring, needs=("write", "export-patch"), out="compared"),
        "run": surgery(
            "run", recipe, *given, *attributed, *tuning, *_set(*FEWER), *measuring, out="run", frees=("run",), whole=True
        ),
        "estimate": surgery(*whole, "--dry-run", "--json", out="estimated"),
        "recipe": surgery(*whole, out="whole", frees=("whole",)),
    }


def _set(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def recipe_of(name: str) -> Path:
    return ROOT / "recipes" / f"{name}.yaml"


def device() -> str:
    """What is computed on: "cpu", or the memory of the GPU in GB."""
    import torch

    return f"{torch.cuda.get_device_properties(0).total_memory / 1e9:.0f}" if torch.cuda.is_available() else "cpu"


def foretold(log: Path) -> Foretold:
    """From the JSON that `surgery run --dry-run --json` printed among its messages."""
    printed = log.read_text()
    estimate = json.loads(printed[printed.index("\n{" if not printed.startswith("{") else "{") :].partition("\n}\n")[0] + "\n}")
    stages = estimate["stages"]
    return Foretold(
        seconds=sum(stage["seconds"] for stage in stages), memory=max(stage["memory"] for stage in stages),
        disk=sum(stage["disk"] for stage in stages),
    )  # fmt: skip


class Size(NamedTuple):
    """How a model is cut; the default is not at all."""

    layers: int | None = None
    vocabulary: int | None = None
    narrow: bool = False

    def options(self) -> list[str]:
        """Of the command line."""
        numbers = {"--layers": self.layers, "--vocabulary": self.vocabulary}
        named = [part for name, value in numbers.items() if value is not None for part in (name, str(value))]
        return [*named, *(["--narrow"] if self.narrow else [])]

    def cut(self, model: Published) -> dict[str, Any]:
        return cut(model.config, *self)


class Job:
    """The stages of one model in one folder."""

    def __init__(self, model: Published, work: Path, record: Path, size: Size, tokenizer: Path | None, dtype: str):
        self.model, self.record, self.dtype = model, record, dtype
        self.folder = work / "-".join([model.name, *size.options()]).replace("--", "")
        config = size.cut(model)
        self.layers, self.vocabulary = size.layers or model.layers, config["vocab_size"]
        apart = is_original(config) or config["model_type"] == "llamba"
        grafted = "\nplan:" in recipe_of(model.name).read_text()
        writing = ["-m", "tools.full_size", model.name, "--write-to", "model", "--dtype", dtype, *size.options()]
        writing += [] if tokenizer is None else ["--tokenizer", str(tokenizer.resolve())]
        self.steps = {"write": Step(writing, makes="model")} | steps(model.name, dtype, grafted, apart)

    def do(self, stages: list[str], again: bool = False) -> bool:
        """Whether all of the stages passed. Raises UserError for one that this model lacks."""
        if unknown := [stage for stage in stages if stage not in self.steps]:
            raise UserError(f"there is no stage {unknown[0]} for {self.model.name}; there are {', '.join(self.steps)}")
        code, passed = environment().code, True
        for stage in stages:
            known = self._recorded(stage)
            if not again and known is not None and known.environment.code == code:
                print(f"{known.line()} (on record)", flush=True)
            else:
                known = self._measure(stage)
            passed = passed and known.passed
        return passed

    def _recorded(self, stage: str) -> Stage | None:
        key = (self.model.name, stage, self.layers, self.vocabulary, self.dtype, device())
        record = FullSize.read(self.record) if self.record.exists() else FullSize()
        same = [known for known in record.stages if known.key() == key and known.arguments == self._public(self.steps[stage])]
        return same[0] if same and same[0].failure is None else None

    def _public(self, step: Step) -> tuple[str, ...]:
        """Arguments without places on this machine."""
        return tuple(Path(part).name if os.path.isabs(part) else part for part in step.arguments)

    def _begun(self, stage: str) -> Path:
        """Is there while what a stage makes is not whole."""
        return self.folder / f"{stage}.begun"

    def _measure(self, stage: str) -> Stage:
        step = self.steps[stage]
        for maker in step.needs:
            if not (self.folder / self.steps[maker].makes).exists() or self._begun(maker).exists():
                self._measure(maker)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._begun(stage).touch()
        output = self.folder / step.makes
        if step.makes and output.exists():
            shutil.rmtree(output) if output.is_dir() else output.unlink()
        print(f"{stage} ...", flush=True)
        outcome = measure(
            [sys.executable, *step.arguments], self.folder / f"{stage}.log",
            {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(environment().threads)}, self.folder,
        )  # fmt: skip
        files = [file for file in (self.folder / "model").iterdir() if file.suffix in (".safetensors", ".bin")]
        weights = sum(file.stat().st_size for file in files)
        limit = 0 if stage in ("write", "estimate", "recipe") else int(1.25 * weights + 4 * GIB) if step.whole else LIMIT
        lines = [line for line in outcome.output.splitlines() if line.strip()]
        failure = None if outcome.status == 0 else f"exit status {outcome.status}: {lines[-1] if lines else ''}"
        measured = Stage(
            model=self.model.name, stage=stage, layers=self.layers, vocabulary=self.vocabulary, dtype=self.dtype,
            device=device(), arguments=self._public(step), environment=environment(), seconds=round(outcome.seconds, 1),
            cpu_seconds=round(outcome.cpu_seconds, 1), weights=weights, peak=outcome.peak, anonymous=outcome.anonymous,
            files=outcome.files, limit=limit, passed=failure is None and (not limit or outcome.peak <= limit), failure=failure,
            foretold=foretold(self.folder / f"{stage}.log") if stage == "estimate" and failure is None else None,
        )  # fmt: skip
        earlier = FullSize.read(self.record) if self.record.exists() else FullSize()
        earlier.with_stage(measured).write(self.record)
        print(measured.line(), flush=True)
        if failure is not None:
            raise UserError(f"{stage} failed, see {self.folder / f'{stage}.log'}: {failure}")
        self._begun(stage).unlink()
        for name in step.frees:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", choices=names())
    parser.add_argument("--work", type=Path, help="a folder on a large disk, for weights, outputs and logs")
    parser.add_argument("--stages", help="these, by commas; by default all but run, estimate and recipe")
    parser.add_argument("--again", action="store_true", help="measure stages that are on record again")
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument("--vocabulary", type=int, help="a smaller vocabulary")
    parser.add_argument("--narrow", action="store_true", help="the widths of tools/published.py")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer, or a tokenizer.json")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--record", type=Path, help="another record than recipes/full-size.json")
    parser.add_argument("--write-to", type=Path, help="only write the weights there")
    given = parser.parse_args()
    model, size = published(given.model), Size(given.layers, given.vocabulary, given.narrow)
    if given.write_to is not None:
        from tools.random_weights import write

        write(size.cut(model), given.write_to, dtype=given.dtype, tokenizer=given.tokenizer)
        return
    if given.work is None:
        parser.error("--work is missing: where the weights go")
    record = given.record or (RECORD if size == Size() else given.work / "full-size.json")
    job = Job(model, given.work, record.resolve(), size, given.tokenizer, given.dtype)
    stages = given.stages.split(",") if given.stages else [stage for stage in job.steps if stage not in NAMED]
    try:
        passed = job.do(stages, given.again)
    except UserError as error:
        print(f"full_size: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
