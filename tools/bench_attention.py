"""Speed of graft attention on a GPU: python -m tools.bench_attention [--out FILE.json] [--longest 32768] [--rounds 20]

FlashAttention 2, 3 and 4, torch's flex_attention and sdpa, forward, and forward with backward, in the shapes of grafts. The
contenders take turns within one run, so that clocks and neighbours touch all alike; medians, and ratios to flex_attention's.
A contender's TFLOP/s count the products that the call needs (queries of w with keys, weights with values of dv, causal), not
what a kernel pads or computes twice. What the file holds already, of the same GPU and packages, is not measured again.
"""

import argparse
import importlib.metadata
import json
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from surgery.kernels.attention import GRAFT_ATTENTION
from surgery.kernels.dispatch import Backend

CONTENDERS = ("flash4", "flash3", "flash2", "flex", "sdpa")
PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4")


class Shape(NamedTuple):
    """w: of queries and keys, the time step included; dv: of the values of all heads that share a pair."""

    name: str
    pairs: int
    w: int
    dv: int


SHAPES = (
    Shape("mamba2-130m, a pair a head", 24, 129, 64),
    Shape("mamba2-130m, a pair for 2 heads", 12, 129, 128),
    Shape("mamba2-130m, one pair", 1, 129, 24 * 64),
    Shape("mamba2-130m, 2 heads grafted", 2, 129, 64),
    Shape("mamba2-2.7b, a pair a head", 80, 129, 64),
    Shape("mamba2-2.7b, one pair", 1, 129, 80 * 64),
    Shape("falcon-mamba-7b, 512 channels, a pair for 4", 128, 17, 4),
    Shape("falcon-mamba-7b, 512 channels, a pair for 64", 8, 17, 64),
)


def contender(
    backend: Backend, shape: Shape, tokens: int, queries: int, train: bool
) -> tuple[Callable[[], object] | None, str]:
    """What to time, and an empty string, or None and why not."""
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, shape.pairs, n, width, generator=g, device="cuda", dtype=torch.bfloat16).requires_grad_(train)
        for n, width in ((queries, shape.w), (tokens, shape.w), (tokens, shape.dv))
    )
    q.data *= shape.w**-0.5
    if reason := GRAFT_ATTENTION.why_not(backend, q, k, v, None, by_name=True):
        return None, reason
    if not train:
        return lambda: backend.run(q, k, v, None), ""
    weight = torch.randn(1, shape.pairs, queries, shape.dv, generator=g, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.autograd.grad(backend.run(q, k, v, None), (q, k, v), weight), ""


def milliseconds(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def operations(shape: Shape, tokens: int, queries: int, train: bool) -> float:
    """2 for each score and column, over the scores that causality leaves. The backward pass: scores again, dp, dv, dq, dk."""
    scores = shape.pairs * (queries * (tokens - queries) + queries * (queries + 1) / 2)
    return 2 * scores * (4 * shape.w + 3 * shape.dv if train else shape.w + shape.dv)


def measure(shape: Shape, tokens: int, queries: int, train: bool, rounds: int) -> dict:
    runs, absent = {}, {}
    for name in CONTENDERS:
        try:
            run, reason = contender(GRAFT_ATTENTION.backends[name], shape, tokens, queries, train)
            if run:
                run()  # compiles and chooses tiles
                torch.cuda.synchronize()
                runs[name] = run
            else:
                absent[name] = reason
        except (torch.OutOfMemoryError, RuntimeError) as failure:
            absent[name] = f"{type(failure).__name__}: {' '.join(str(failure).split())[:150]}"
    times = milliseconds(runs, rounds)
    rate = {name: operations(shape, tokens, queries, train) / ms / 1e9 for name, ms in times.items()}
    return {
        "shape": shape._asdict(), "tokens": tokens, "queries": queries, "train": train, "milliseconds": times, "tflops": rate,
        "times_flex": {name: ms / times["flex"] for name, ms in times.items() if "flex" in times}, "absent": absent,
    }  # fmt: skip


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def measured_before(path: Path, record: dict) -> list[dict]:
    """The cells of a file, if it is of the same GPU and packages."""
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    same = all(earlier[key] == json.loads(json.dumps(record[key])) for key in ("gpu", "capability", "versions", "dtype"))
    return earlier["cells"] if same else []


def _key(cell: dict) -> tuple:
    return tuple(cell["shape"].values()), cell["tokens"], cell["queries"], cell["train"]


def write_json(path: Path, record: object) -> None:
    """At once: a run that is killed leaves the file as it was, or as it is to be."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="attention-benchmark.json")
    parser.add_argument("--longest", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this benchmark needs a GPU")
    cells: list[dict] = []
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "versions": {package: version(package) for package in PACKAGES} | {"cuda": torch.version.cuda},
        "dtype": "bfloat16",
        "cells": cells,
    }
    cells += measured_before(Path(options.out), record)
    before = {_key(cell) for cell in cells}
    print(f"{record['gpu']}, {record['versions']}\nmilliseconds (TFLOP/s, times flex)")
    print(f"{'':46}{'tokens':>7} {'pass':8}" + "".join(f"{name:>24}" for name in CONTENDERS))
    lengths = [n for n in (1024, 4096, 8192, 16384, 32768) if n <= options.longest]
    for shape in SHAPES:
        for tokens in lengths:
            for title, queries, train in (("forward", tokens, False), ("train", tokens, True), ("decode", 1, False)):
                if (tuple(shape), tokens, queries, train) in before:
                    continue
                cell = measure(shape, tokens, queries, train, options.rounds)
                cells.append(cell)
                columns = [
                    f"{cell['milliseconds'][name]:9.3f} ({cell['tflops'][name]:5.0f}, {cell['times_flex'].get(name, 0):5.2f})"
                    if name in cell["milliseconds"]
                    else "-"
                    for name in CONTENDERS
                ]
                print(f"{shape.name:46}{tokens:7} {title:8}" + "".join(f"{text:>24}" for text in columns), flush=True)
                write_json(Path(options.out), record)  # after every cell: a crash leaves what was measured
    for name, reason in {name: reason for cell in cells for name, reason in cell["absent"].items()}.items():
        print(f"{name} did not serve every call; the last reason: {reason}")


if __name__ == "__main__":
    main()
