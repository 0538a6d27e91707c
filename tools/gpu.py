"""All that wants a real GPU, in one command: python -m tools.gpu [--minutes 9] [--out recipes/gpu.json] [--work runs/gpu]

    tests    pytest -m gpu
    kernels  graft attention against FlashAttention and torch, in TFLOP/s and ratios (tools/bench_attention.py)
    scans    the other kernels and whole models against stock (tools/bench_kernels.py)
    memory   the most that a hybrid of the published shape holds, forward and with backward (tools/gpu_memory.py)
    demo     surgery run recipes/demo.yaml on the GPU

The record says of each what became of it. What is finished is not done again while GPU, packages and code stay what they were;
what the time ended is gone on with by the next call. It installs nothing and needs no network. Status: 0 if all parts passed,
1 if one failed or there is no GPU, 2 if the time ended first.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NEEDED = ("torch", "transformers", "accelerate", "peft", "pydantic", "typer", "pytest")
GRACE = 15.0  # seconds in which a part that is interrupted writes down how far it is
LEAST = 20.0  # seconds: with less left, no other part is begun
PASSED, FAILED, UNFINISHED = "passed", "failed", "out of time"


@dataclass(frozen=True)
class Part:
    """command: to be run in the repository's root. read: -> what goes into the record, from the command's output."""

    name: str
    command: tuple[str, ...]
    read: Callable[[str], Any]


SCANS = (
    *("ssd_forward", "ssd_forward_backward", "ssd_step_forward", "rms_norm_forward"),
    *("hybrid_prefill", "hybrid_decode", "tune_step"),
)


def parts(work: Path) -> list[Part]:
    """In their order. Each goes on, or is short, when it is called again."""
    kernels, scans, memory = (work / f"{name}.json" for name in ("kernels", "scans", "memory"))
    demo = work / "demo"

    def python(name: str, command: str, *more: str, read: Callable[[str], Any]) -> Part:
        return Part(name, (sys.executable, "-m", *command.split(), *more), read)

    only = [part for group in SCANS for part in ("--only", group)]
    return [
        python("tests", "pytest -q -n 0 -m gpu -p no:cacheprovider tests", read=summary),
        python("kernels", "tools.bench_attention --longest 8192 --rounds 10 --out", str(kernels), read=of(kernels)),
        python("memory", "tools.gpu_memory --out", str(memory), read=of(memory)),
        python(
            "demo", "surgery run recipes/demo.yaml --set device=cuda --resume --out", str(demo),
            read=of(demo / "report.json", figures),
        ),
        python("scans", "tools.bench_kernels --seconds 1", *only, "--out", str(scans), read=of(scans)),
    ]  # fmt: skip


def of(path: Path, choose: Callable[[Any], Any] = lambda content: content) -> Callable[[str], Any]:
    """Reads what a command wrote, if it came so far."""
    return lambda _: choose(json.loads(path.read_text())) if path.exists() else None


def summary(output: str) -> str:
    """pytest's last line, without the time that it took."""
    return re.sub(r" in [\d.]+s.*", "", output.strip().splitlines()[-1]).strip("= ") if output.strip() else ""


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """Of the demo's report: how long its stages took, what they held, and what came out."""
    models = {
        name: {"kv": {size: result["accuracy"] for size, result in model["kv"].items()}}
        | {task: model[task][key] for task, key in (("knowledge", "accuracy"), ("perplexity", "value")) if model[task]}
        for name, model in report["models"].items()
    }
    return {"timings": report["timings"], "memory": report["memory"], "models": models}


def machine() -> dict[str, Any] | str:
    """What numbers depend on: GPU, packages and code; or one line that says why nothing can be measured."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)}: not installed for {Path(sys.executable).name}; install this package there first"
    import torch

    if not torch.cuda.is_available():
        return "no GPU that torch can use is here; nothing was done"
    from surgery.records.record import KERNEL_PACKAGES, PACKAGES, code_digest, package_version

    return {
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "memory": torch.cuda.get_device_properties(0).total_memory,
        "cuda": torch.version.cuda,
        "versions": {name: package_version(name) for name in (*PACKAGES, *KERNEL_PACKAGES, "flash-attn-3", "flash-attn-4")},
        "code": code_digest(),
    }


def conduct(todo: Sequence[Part], here: dict[str, Any], out: Path, log: Path, seconds: float) -> int:
    """Do what the record at `out` lacks, within the time. Returns the status to end with.

    log: a folder for what the parts print."""
    end = time.monotonic() + seconds
    record = earlier(out, here)
    done: dict[str, Any] = record["parts"]
    log.mkdir(parents=True, exist_ok=True)
    for part in todo:
        if done.get(part.name, {}).get("outcome") == PASSED:
            print(f"{part.name}: done before", flush=True)
            continue
        left = end - time.monotonic()
        if left < min(LEAST, seconds / 2):
            done.setdefault(part.name, {"outcome": UNFINISHED, "seconds": 0.0, "result": None})
            continue
        before = done.get(part.name, {}).get("seconds", 0.0)
        print(f"{part.name}: {' '.join(part.command)}", flush=True)
        start = time.monotonic()
        outcome, output = run(part.command, left, log / f"{part.name}.log")
        took = round(before + time.monotonic() - start, 1)
        try:
            result = part.read(output)
        except (OSError, ValueError, KeyError, IndexError) as failure:
            outcome, result = FAILED if outcome == PASSED else outcome, f"{type(failure).__name__}: {failure}"
        done[part.name] = {"outcome": outcome, "seconds": took, "result": result}
        print(f"{part.name}: {outcome}, {took:.0f} s", flush=True)
        record["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        write(out, record)
    write(out, record)
    outcomes = {done[part.name]["outcome"] for part in todo}
    if UNFINISHED in outcomes:
        rest = ", ".join(part.name for part in todo if done[part.name]["outcome"] == UNFINISHED)
        print(f"gpu: the time ended before {rest}; the same command goes on there", flush=True)
    return 1 if FAILED in outcomes else 2 if UNFINISHED in outcomes else 0


def earlier(out: Path, here: dict[str, Any]) -> dict[str, Any]:
    """The record to go on with: of the same machine, packages and code, or a new one."""
    if out.exists():
        record = json.loads(out.read_text())
        if record["machine"] == here:
            return record
        print(f"{out} is of another GPU, of other packages or of other code: everything is done anew", flush=True)
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": here, "parts": {}}


def run(command: Sequence[str], seconds: float, log: Path) -> tuple[str, str]:
    """What became of a command, and what it printed. When the time ends it is interrupted, as by Ctrl-C, and then ended."""
    status: int | None
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what it runs in the background; parts inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        try:
            status = process.wait(max(0.1, seconds - GRACE if seconds > 2 * GRACE else seconds / 2))
        except subprocess.TimeoutExpired:
            status = None
            _end(process)
        except BaseException:
            _end(process)
            raise
    outcome = UNFINISHED if status is None else FAILED if status else PASSED
    return outcome, log.read_text(errors="replace")


def _end(process: subprocess.Popen) -> None:
    """With all that it started: it has a process group of its own."""
    for number, wait in ((signal.SIGINT, GRACE), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def write(path: Path, record: dict[str, Any]) -> None:
    """At once: a run that is killed leaves the file as it was, or as it is to be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=ROOT / "recipes" / "gpu.json")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "gpu")
    options = parser.parse_args(arguments)
    here = machine()
    if isinstance(here, str):
        print(f"gpu: {here}", file=sys.stderr)
        return 1
    work = options.work.absolute()
    return conduct(parts(work), here, options.out, work, options.minutes * 60)


if __name__ == "__main__":
    sys.exit(main())
