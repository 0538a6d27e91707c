"""How fast this project's kernels are on this machine: every operation against the code that it replaces, in one run.

    python -m tools.bench_kernels --out recipes/kernels.bench.json                        # minutes
    python -m tools.bench_kernels --only rms_norm_forward --out recipes/kernels.bench.json  # again, into what is there

Shapes are those of published models. A kernel cell compares the backends of one operation. A model cell compares a whole base
in stock transformers with the same weights on our kernels (`prefill`), or a hybrid with one grafted head with its base.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from surgery.cli.console import show, table
from surgery.doctor.diagnosis import describe
from surgery.errors import UserError
from surgery.kernels.attention import GRAFT_ATTENTION
from surgery.kernels.conv import CAUSAL_CONV
from surgery.kernels.dispatch import Operation
from surgery.kernels.divergence import KL_DIVERGENCE
from surgery.kernels.norm import RMS_NORM
from surgery.kernels.selective import SELECTIVE_SCAN, SELECTIVE_STEP
from surgery.kernels.ssd import SSD_SCAN, SSD_STEP
from surgery.records.plan import Plan
from surgery.records.record import KERNEL_PACKAGES, PACKAGES, Environment, Marked, Record, environment
from surgery.runtime.progress import Track
from surgery.runtime.timing import peak_bytes
from surgery.splicing.splice import adopt, splice
from tools import bench_locating as locating
from tools import bench_shapes as shapes
from tools import bench_tuning as tuning
from tools.turns import Runs, milliseconds


class BenchmarkCell(Record):
    """One comparison.

    milliseconds: contender -> median time. ratio: the baseline's time divided by that of `ours`. memory_mb: contender -> the
    most memory that a call holds at once. memory_ratio: the memory of `ours` divided by the baseline's. difference: the largest
    difference between their logits, where these have to be equal."""

    shape: str
    tokens: int
    device: str
    dtype: str
    threads: int
    ours: str
    baseline: str
    milliseconds: dict[str, float]
    ratio: float
    memory_mb: dict[str, float] = {}
    memory_ratio: float | None = None
    difference: float | None = None


class Benchmark(Marked):
    environment: Environment
    ssd_forward: tuple[BenchmarkCell, ...] = ()
    ssd_forward_backward: tuple[BenchmarkCell, ...] = ()
    selective_scan_forward: tuple[BenchmarkCell, ...] = ()
    selective_scan_forward_backward: tuple[BenchmarkCell, ...] = ()
    graft_attention_forward: tuple[BenchmarkCell, ...] = ()
    graft_attention_forward_backward: tuple[BenchmarkCell, ...] = ()
    causal_conv_forward: tuple[BenchmarkCell, ...] = ()
    causal_conv_forward_backward: tuple[BenchmarkCell, ...] = ()
    rms_norm_forward: tuple[BenchmarkCell, ...] = ()
    rms_norm_forward_backward: tuple[BenchmarkCell, ...] = ()
    kl_divergence_forward: tuple[BenchmarkCell, ...] = ()
    ssd_step_forward: tuple[BenchmarkCell, ...] = ()
    selective_step_forward: tuple[BenchmarkCell, ...] = ()
    prefill: tuple[BenchmarkCell, ...] = ()
    hybrid_prefill: tuple[BenchmarkCell, ...] = ()
    hybrid_decode: tuple[BenchmarkCell, ...] = ()
    locate_exact: tuple[BenchmarkCell, ...] = ()
    locate_confirmed: tuple[BenchmarkCell, ...] = ()
    tune_step: tuple[BenchmarkCell, ...] = ()

    def check_environment(self, here: Environment) -> None:
        """Raise UserError if this was measured on another machine or with other packages than `here`: such numbers do not
        belong in one table."""
        mine, others = (each.model_dump(exclude={"created", "toolkit", "code"}) for each in (self.environment, here))
        if mine != others:
            raise UserError(
                "the file was measured on another machine or with other packages; measure all groups again, without --only"
            )

    def updated(self, other: "Benchmark") -> "Benchmark":
        """This benchmark, with the groups that `other` measured later in place of its own. Raises UserError as
        check_environment does."""
        self.check_environment(other.environment)
        return self.model_copy(
            update={"environment": other.environment} | {group: cells for group in GROUPS if (cells := getattr(other, group))}
        )


GROUPS = tuple(name for name, field in Benchmark.model_fields.items() if field.default == ())


@dataclass(frozen=True)
class Case:
    """One comparison to be made. make: builds the calls to time, contender -> call, ours first. same: whether all contenders
    have to give the same result. least: the smallest number of rounds."""

    group: str
    shape: str
    tokens: int
    dtype: torch.dtype
    baseline: str
    make: Callable[[], Runs]
    memory: bool = True
    same: bool = False
    least: int = 3


def benchmark(groups: tuple[str, ...] = GROUPS, *, device: torch.device | None = None, seconds: float = 6.0) -> Benchmark:
    """Measure the cells of some groups, each for at least `seconds`. On a CPU kernels are measured with one thread and with all
    of them, models with all of them."""
    device = device or (torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    all_threads = torch.get_num_threads()
    thread_counts = sorted({1, all_threads}) if device.type == "cpu" else [all_threads]
    work = [
        (case, threads)
        for case in cases(device)
        if case.group in groups
        for threads in (thread_counts if case.memory else [all_threads])  # whole models take long
    ]
    cells: dict[str, list[BenchmarkCell]] = {}
    progress = Track(work, "bench", interval=10)
    try:
        for case, threads in progress:
            progress.note = f"{case.group} {case.shape}, {case.tokens} tokens, {threads} threads"
            torch.set_num_threads(threads)
            cells.setdefault(case.group, []).append(measure(case, device, threads, seconds))
    finally:
        torch.set_num_threads(all_threads)
    groups_of_cells = {group: tuple(values) for group, values in cells.items()}
    return Benchmark(environment=here(), **groups_of_cells)  # type: ignore[arg-type]


def here() -> Environment:
    """What the numbers of this process belong to."""
    return environment((*PACKAGES, *KERNEL_PACKAGES))


def measure(case: Case, device: torch.device, threads: int, seconds: float) -> BenchmarkCell:
    """The time and the memory of every contender."""
    runs = case.make()
    ours, times = next(iter(runs)), milliseconds(runs, device, seconds=seconds, least=case.least)
    memory = {name: peak_bytes(run, device) / 2**20 for name, run in runs.items()} if case.memory else {}
    return BenchmarkCell(
        shape=case.shape,
        tokens=case.tokens,
        device=str(device),
        dtype=str(case.dtype).removeprefix("torch."),
        threads=threads,
        ours=ours,
        baseline=case.baseline,
        milliseconds={name: round(value, 3) for name, value in times.items()},
        ratio=round(times[case.baseline] / times[ours], 3),
        memory_mb={name: round(value, 2) for name, value in memory.items()},
        memory_ratio=round(memory[ours] / memory[case.baseline], 3) if memory else None,
        difference=(runs[ours]() - runs[case.baseline]()).abs().max().item() if case.same else None,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """All comparisons, in the order of the groups."""
    cpu = device.type == "cpu"
    dtype = torch.float32 if cpu else torch.bfloat16
    kernels: list[tuple[Operation, str, str, Callable, int, tuple[int, ...], tuple[int, ...]]] = [
        (SSD_SCAN, "stock", "mamba2-130m", shapes.ssd_inputs, 24, (1024, 4096), (1024, 4096)),
        (SSD_SCAN, "stock", "mamba2-2.7b", shapes.ssd_inputs, 80, (1024,), (1024,)),
        # The time of the stock backward pass grows with the square of the length: 1,024 tokens would take it many minutes.
        (SELECTIVE_SCAN, "stock", "mamba-130m", shapes.selective_inputs, 1536, (1024, 4096), (256,)),
        (SELECTIVE_SCAN, "stock", "falcon-mamba-7b", shapes.selective_inputs, 8192, (512,), (64,)),
    ]
    long = (256, 1024, 4096) if cpu else (1024, 4096, 16384)
    kernels += [
        (GRAFT_ATTENTION, "sdpa", f"mamba2-130m, {heads} heads", shapes.attention_inputs, heads, long, long)
        for heads in (1, 24)
    ]
    # What surrounds the scan; the logits of as many tokens as tuning has at once; one decoding step of 1 and of 16 sequences.
    kernels += [
        (CAUSAL_CONV, "stock", "mamba2-130m", shapes.conv_inputs, 1792, (1024,), (1024,)),
        (RMS_NORM, "stock", "mamba2-130m", shapes.norm_inputs, 1536, (1024,), (1024,)),
        (KL_DIVERGENCE, "stock", "tiny-mamba2", shapes.logits, 1664, (315,), ()),
        (KL_DIVERGENCE, "stock", "mamba2-130m", shapes.logits, 50288, (128,), ()),
        (SSD_STEP, "stock", "mamba2-130m", shapes.ssd_step_inputs, 24, (1, 16), ()),
        (SELECTIVE_STEP, "stock", "mamba-130m", shapes.selective_step_inputs, 1536, (1, 16), ()),
    ]
    for operation, baseline, shape, inputs, width, forward, backward in kernels:
        for lengths, gradient in ((forward, False), (backward, True)):
            for t in lengths:
                make = partial(inputs, width, t, device, dtype)
                yield kernel_case(operation, shape, t, baseline, make, dtype, backward=gradient)
    for shape, build in shapes.BASES.items():
        for t in (1024,) if shape == "mamba-130m" else (1024, 4096):  # stock needs several minutes for the longer one
            yield Case("prefill", shape, t, dtype, "stock", _prefill(build, t, device, dtype), memory=False, same=True)
    for group in ("hybrid_prefill", "hybrid_decode"):
        contenders = _hybrid(4096, device, dtype, decode=group == "hybrid_decode")
        yield Case(group, "mamba2-130m, one head grafted", 4096, dtype, "base", contenders, memory=False)
    published, exact = locating.exact_against_published(device), locating.confirmed_against_exact(device)
    options: dict[str, Any] = {"memory": False, "least": 1}  # a round takes a minute
    yield Case("locate_exact", "tiny-mamba2, 32 pairs", 143, torch.float32, "published", published, same=True, **options)
    yield Case("locate_confirmed", "mamba2-130m, 4 pairs", 31, torch.float32, "exact", exact, **options)
    step, tokens = tuning.graft_against_trainer(device), sum(part.numel() for part in tuning.batch()[::2])
    yield Case("tune_step", "tiny-mamba2, two heads grafted", tokens, torch.float32, "trainer", step)


def kernel_case(
    operation: Operation,
    shape: str,
    tokens: int,
    baseline: str,
    inputs: Callable[[], tuple],
    dtype: torch.dtype,
    *,
    backward: bool,
) -> Case:
    """A case whose contenders are all backends that can serve the call, except the reference, and on a CPU those that would
    never be chosen."""

    def make() -> Runs:
        args = tuple(a.requires_grad_(backward and a.is_floating_point()) if isinstance(a, Tensor) else a for a in inputs())
        backends = [b for b in operation.backends.values() if b is not operation.reference]
        if args[0].device.type == "cpu":
            backends = [b for b in backends if not b.declines(*args)]
        serving = [b.name for b in backends if not operation.why_not(b, *args)]
        ours = operation.choose(*args).name
        return {name: _call(operation, args, name, backward) for name in dict.fromkeys([ours, *serving])}

    group = operation.name + ("_forward_backward" if backward else "_forward")
    return Case(group.replace("ssd_scan", "ssd"), shape, tokens, dtype, baseline, make)


def _call(operation: Operation, args: tuple, backend: str, backward: bool) -> Callable[[], Any]:
    """A call of one backend. backward: also compute the gradient of its first result with respect to all inputs."""
    leaves = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]

    def forward() -> Any:
        with torch.no_grad():
            return operation(*args, backend=backend)

    def forward_backward() -> Any:
        result = operation(*args, backend=backend)
        y = result if isinstance(result, Tensor) else result[0]
        return torch.autograd.grad(y, leaves, torch.ones_like(y))

    return forward_backward if backward else forward


def _prefill(build: Callable[[], Any], tokens: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Runs]:
    def make() -> Runs:
        stock = build().to(device=device, dtype=dtype).eval()
        ids = _ids(stock, tokens)
        return {"ours": _reader(adopt(stock), ids), "stock": _reader(stock, ids)}

    return make


def _hybrid(tokens: int, device: torch.device, dtype: torch.dtype, decode: bool) -> Callable[[], Runs]:
    """Prefill, or one decoding step after it: a base on our kernels, and the same base with one grafted head."""

    def make() -> Runs:
        base = shapes.BASES["mamba2-130m"]().to(device=device, dtype=dtype).eval()
        contenders = {"hybrid": splice(base, Plan(sites=("L0.H0",))), "base": adopt(base)}  # type: ignore[arg-type]
        ids = _ids(base, tokens)
        if not decode:
            return {name: _reader(model, ids) for name, model in contenders.items()}
        return {name: _decoder(model, ids) for name, model in contenders.items()}

    return make


def _ids(model: PreTrainedModel, tokens: int) -> Tensor:
    return torch.arange(tokens, device=model.device)[None] % model.config.vocab_size


def _reader(model: PreTrainedModel, ids: Tensor) -> Callable[[], Any]:
    def read() -> Any:
        with torch.inference_mode():
            return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

    return read


def _decoder(model: PreTrainedModel, ids: Tensor) -> Callable[[], Any]:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=ids, cache_params=cache, use_cache=True, logits_to_keep=1)

    def decode() -> Any:
        with torch.inference_mode():
            return model(input_ids=ids[:, :1], cache_params=cache, use_cache=True).logits

    return decode


def cell_rows(benchmark: Benchmark, before: Benchmark | None = None) -> tuple[list[str], list[list[str]]]:
    """One row for each measurement. before: an earlier version's, whose ratios of the same cells make a column of their own."""
    earlier = {} if before is None else {_of(group, cell): cell.ratio for group in GROUPS for cell in getattr(before, group)}
    body = []
    for group in GROUPS:
        for cell in getattr(benchmark, group):
            times = ", ".join(f"{name} {value:.4g} ms" for name, value in cell.milliseconds.items())
            memory = "" if cell.memory_ratio is None else f"{cell.memory_ratio:.2f}"
            times += "" if cell.difference is None else f"; logits differ by {cell.difference:.0e}"
            row = [
                group.replace("_", " "),
                cell.shape,
                f"{cell.tokens:,}",
                str(cell.threads),
                times,
                f"{cell.ratio:.2f}",
                memory,
            ]
            if before is not None:
                ratio = earlier.get(_of(group, cell))
                row.append("" if ratio is None else f"{ratio:.2f}")
            body.append(row)
    header = ["measured", "shape", "tokens", "threads", "median time", "times as fast", "memory, share"]
    return header if before is None else [*header, f"in {before.environment.toolkit}"], body


def _of(group: str, cell: BenchmarkCell) -> tuple[str, str, int, int]:
    """What two measurements have in common that may be compared."""
    return group, cell.shape, cell.tokens, cell.threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=GROUPS, help="only this, into what --out holds")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each measurement, at least")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.out:
        Benchmark.check_place(given.out)  # before minutes are spent
    earlier = Benchmark.read(given.out) if given.only and given.out and given.out.exists() else None
    if earlier is not None:
        earlier.check_environment(here())
    result = benchmark(tuple(given.only or GROUPS), seconds=given.seconds)
    if earlier is not None:
        result = earlier.updated(result)
    if given.out:
        result.write(given.out)
    show(describe(result.environment))
    table(*cell_rows(result))


if __name__ == "__main__":
    main()
