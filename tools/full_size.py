"""The whole job on random weights in the full shape of a published model, stage by stage, each in a process of its own whose peak
memory and time go into a record: python -m tools.full_size falcon-mamba-7b --work /large/disk

Stages: write (the folder of weights), load, locate, plan, splice, tune, export-patch, export-hf, bench; and run, the whole `surgery
run` with all controls, if it is named. A stage that is in the record with the same code, sizes and arguments is not repeated, so
the script may be stopped at any time; what later stages need and is no longer there is made again. --layers and --vocabulary cut
the model, for trying this out: such stages go into WORK/full-size.json.

Memory: tools/peak_memory.py says what is counted. Time: of the process, on the threads that the record names. Disk: three times
the weights.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from surgery.errors import UserError
from surgery.records.record import Environment, Record, environment
from tools.peak_memory import measure
from tools.published import Published, cut, names, published

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "recipes" / "full-size.json"
GIB = 2**30
LIMIT = 20 * GIB  # of a stage, on a machine of 24 GiB
# Fewer of everything, so that a 7B model passes on two cores in half an hour: memory hangs on the sizes of batches and not on how
# many there are.
QUESTIONS = ["locate.examples=2", "locate.batch_size=2", "locate.options.pairs=4"]
TEXTS = ["data.train_text=world", "data.held_out_text=world"]
STEPS = [
    "tune.steps=10", "tune.batch_size=1", "tune.lessons=[{probe: kv, options: {pairs: 40}, queries: 8}]",
    "tune.text_batch_size=1", "tune.text_tokens=256", "tune.gradient_accumulation_steps=1",
]  # fmt: skip
MEASURED = ["bench.limit=8", "bench.pairs=[4]", "bench.windows=2", "bench.window=256", "bench.contexts=[256]"]
LOCATED_EXACTLY = ["locate.confirm=0.0005", "locate.layers=false"]  # where there is no attribution


class Stage(Record):
    """One stage of one model. layers, vocabulary: its size. weights, peak, anonymous, files, limit: bytes (tools/peak_memory.py).
    failure: the last line that a stage printed which did not end well."""

    model: str
    stage: str
    layers: int
    vocabulary: int
    dtype: str
    arguments: tuple[str, ...]
    environment: Environment
    seconds: float
    weights: int
    peak: int
    anonymous: int
    files: int
    limit: int
    passed: bool
    failure: str | None = None

    def key(self) -> tuple:
        """Of what is the same stage, whoever measured it and when."""
        return self.model, self.stage, self.layers, self.vocabulary, self.dtype

    def line(self) -> str:
        limit = f"of {self.limit / GIB:.1f} GiB" if self.limit else ""
        result = "passed" if self.passed else f"FAILED: {self.failure or 'beyond its limit'}"
        return (
            f"{self.stage}: {self.seconds:.0f} s, peak {self.peak / GIB:.2f} GiB {limit} ({self.anonymous / GIB:.2f} of its own, "
            f"{self.files / GIB:.2f} mapped files), {result}"
        )


class FullSize(Record):
    """recipes/full-size.json. stages: the last measurement of each, in the order in which they were first made."""

    schema_version: int = 1
    stages: tuple[Stage, ...] = ()

    def with_stage(self, stage: Stage) -> "FullSize":
        stages = {each.key(): each for each in self.stages} | {stage.key(): stage}
        return FullSize(stages=tuple(stages.values()))


class Step(NamedTuple):
    """How a stage is done, in the folder of the model. arguments: of Python. needs: stages whose folders it reads. makes: its own
    folder. frees: folders that nothing needs after it. whole: its limit is that of a whole run."""

    arguments: list[str]
    needs: tuple[str, ...] = ()
    makes: str = ""
    frees: tuple[str, ...] = ()
    whole: bool = False


def steps(name: str, dtype: str, grafted: bool = True, apart: bool = False) -> dict[str, Step]:
    """By stage. apart: the model's folder brings no tokenizer."""
    recipe = str(ROOT / "recipes" / f"{name}.yaml")
    words = ["tokenizer=model/tokenizer"] if apart else []
    opening = ["--recipe", recipe, *_set(f"dtype={dtype}", *words)]

    def surgery(*arguments: str) -> list[str]:
        return ["-m", "surgery", *arguments]

    loads = f"from surgery import load; load('model', tokenizer={'model/tokenizer' if apart else None!r}, dtype={dtype!r})"
    exact = [] if grafted else LOCATED_EXACTLY
    result = {
        "load": Step(["-c", loads], ("write",)),
        "locate": Step(
            surgery("locate", "model", *opening, *_set(*QUESTIONS, *exact), "--out", "located"), ("write",), "located"
        ),
    }
    if not grafted:
        return result
    result["locate"].arguments[-2:-2] = _set("locate.exact=false") if "confirm" not in Path(recipe).read_text() else []
    tuning = _set(*TEXTS, *STEPS)
    measuring = _set(*TEXTS, *MEASURED)
    return result | {
        "plan": Step(surgery("plan", "located/ranking.json", "--recipe", recipe), ("locate",), "located/plan.json"),
        "splice": Step(surgery("splice", "model", "located/plan.json", *opening, "--out", "spliced"), ("plan", "write"), "spliced"),
        "tune": Step(
            surgery("tune", "spliced", *opening, *tuning, "--out", "tuned"), ("splice", "write"), "tuned", ("spliced", "tuned-tuning")
        ),
        "export-patch": Step(surgery("export", "tuned", "--format", "patch", "--out", "patch"), ("tune", "write"), "patch"),
        "export-hf": Step(surgery("export", "tuned", "--format", "hf", "--out", "exported"), ("tune",), "exported", ("exported",)),
        "bench": Step(
            surgery("bench", "model", "patch", *opening, *measuring, "--out", "compared"), ("export-patch", "write"), "compared"
        ),
        "run": Step(
            surgery("run", recipe, *_set("model=model", f"dtype={dtype}", *words, *QUESTIONS, *TEXTS, *STEPS, *MEASURED), "--out", "run"),
            ("write",), "run", ("run",), whole=True,
        ),
    }  # fmt: skip


def _set(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


class Job:
    """The stages of one model in one folder."""

    def __init__(self, model: Published, folder: Path, record: Path, layers: int | None, vocabulary: int | None,
                 tokenizer: Path | None, dtype: str, say: Callable[[str], None] = print):  # fmt: skip
        self.model, self.folder, self.record, self.dtype, self.say = model, folder, record, dtype, say
        self.config = cut(model.config, layers, vocabulary)
        self.layers = layers or model.layers
        self.vocabulary = self.config["vocab_size"]
        recipe = (ROOT / "recipes" / f"{model.name}.yaml").read_text()
        apart = "model_type" not in self.config or self.config["model_type"] == "llamba"
        writing = ["-m", "tools.full_size", model.name, "--write-to", "model", "--dtype", dtype]
        writing += [] if layers is None else ["--layers", str(layers)]
        writing += [] if vocabulary is None else ["--vocabulary", str(vocabulary)]
        writing += [] if tokenizer is None else ["--tokenizer", str(tokenizer.resolve())]
        self.steps = {"write": Step(writing, makes="model")} | steps(model.name, dtype, "plan:" in recipe, apart)

    def do(self, stages: list[str], again: bool = False) -> bool:
        """Whether all of the stages passed. Raises UserError for one that this model lacks."""
        if unknown := [stage for stage in stages if stage not in self.steps]:
            raise UserError(f"there is no stage {unknown[0]} for {self.model.name}; there are {', '.join(self.steps)}")
        code, passed = environment().code, True
        for stage in stages:
            known = self._recorded(stage)
            if not again and known is not None and known.environment.code == code:
                self.say(f"{known.line()} (on record)")
            else:
                known = self._measure(stage)
            passed = passed and known.passed
            if known.failure is not None:
                return False
        return passed

    def _recorded(self, stage: str) -> Stage | None:
        key = (self.model.name, stage, self.layers, self.vocabulary, self.dtype)
        record = FullSize.read(self.record) if self.record.exists() else FullSize()
        same = [known for known in record.stages if known.key() == key and known.arguments == self._public(self.steps[stage])]
        return same[0] if same and same[0].failure is None else None

    def _public(self, step: Step) -> tuple[str, ...]:
        """Arguments without places on this machine."""
        return tuple(Path(part).name if os.path.isabs(part) else part for part in step.arguments)

    def _measure(self, stage: str) -> Stage:
        step = self.steps[stage]
        for maker in step.needs:
            if not (self.folder / self.steps[maker].makes).exists():
                self._measure(maker)
        self.folder.mkdir(parents=True, exist_ok=True)
        made = self.folder / step.makes
        if step.makes and made.exists():
            shutil.rmtree(made) if made.is_dir() else made.unlink()
        self.say(f"{stage} ...")
        outcome = measure(
            [sys.executable, *step.arguments], self.folder / f"{stage}.log",
            {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(environment().threads)}, self.folder,
        )  # fmt: skip
        weights = sum(
            file.stat().st_size for file in (self.folder / "model").glob("*model*") if file.suffix in (".safetensors", ".bin")
        )
        limit = 0 if stage == "write" else int(1.25 * weights + 4 * GIB) if step.whole else LIMIT
        lines = [line for line in outcome.output.splitlines() if line.strip()]
        failure = None if outcome.status == 0 else f"exit status {outcome.status}: {lines[-1] if lines else ''}"
        measured = Stage(
            model=self.model.name, stage=stage, layers=self.layers, vocabulary=self.vocabulary, dtype=self.dtype,
            arguments=self._public(step), environment=environment(), seconds=round(outcome.seconds, 1), weights=weights,
            peak=outcome.peak.highest, anonymous=outcome.peak.anonymous, files=outcome.peak.files, limit=limit,
            passed=failure is None and (not limit or outcome.peak.highest <= limit), failure=failure,
        )  # fmt: skip
        earlier = FullSize.read(self.record) if self.record.exists() else FullSize()
        earlier.with_stage(measured).write(self.record)
        self.say(measured.line())
        if failure is not None:
            raise UserError(f"{stage} failed, see {self.folder / f'{stage}.log'}: {failure}")
        for name in step.frees:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", choices=names())
    parser.add_argument("--work", type=Path, help="a folder on a large disk, for weights, outputs and logs")
    parser.add_argument("--stages", help="these, by commas; by default all but run")
    parser.add_argument("--again", action="store_true", help="measure stages that are on record again")
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument("--vocabulary", type=int, help="a smaller vocabulary")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer, or a tokenizer.json")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--record", type=Path, help="another record than recipes/full-size.json")
    parser.add_argument("--write-to", type=Path, help="only write the weights there")
    given = parser.parse_args()
    if given.write_to is not None:
        from tools.random_weights import write

        config = cut(published(given.model).config, given.layers, given.vocabulary)
        write(config, given.write_to, dtype=given.dtype, tokenizer=given.tokenizer)
        return
    if given.work is None:
        parser.error("--work is missing: where the weights go")
    whole = given.layers is None and given.vocabulary is None
    record = given.record or (RECORD if whole else given.work / "full-size.json")
    given.work.mkdir(parents=True, exist_ok=True)
    job = Job(
        published(given.model),
        given.work / given.model,
        record.resolve(),
        given.layers,
        given.vocabulary,
        given.tokenizer,
        given.dtype,
    )
    stages = given.stages.split(",") if given.stages else [stage for stage in job.steps if stage != "run"]
    try:
        passed = job.do(stages, given.again)
    except UserError as error:
        print(f"full_size: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
