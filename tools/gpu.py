"""All that wants a real GPU, in nine minutes: python -m tools.gpu [--out FILE] [--seconds 540] [--only PART ...] [--rehearse]

It takes the machine as it is (Python from 3.11, torch from 2.6); what is missing there is carried in .gpu-carry/, which
`make gpu-carry` fills. Each line of the record is written at once, and a part that fails does not end the rest. --rehearse: on
the CPU, with small sizes. Status: 0 if nothing failed; a package that is installed and does not serve has failed.

    versions   the machine, the packages and what each says when it is imported
    backends   every operation at published sizes: who serves, and the error against float64
    smoke      load, attribution, splice, tune 5 steps, generate, of checkpoints/tiny-mamba2
    step       one step of tuning at mamba2-130m's shape, profiled
    attention  graft attention, forward and with its gradient, against torch's kernels
    scans      the scan, packed and not, and its step at mamba2-2.7b's width
    memory     what a grafted block holds as the context grows
    tests      pytest -m gpu

mamba_ssm's kernels are tuned when they are first called, which takes minutes; --quick tries two configurations of each.
"""

# ruff: noqa: B023  (what is timed is called within the loop that made it)
import argparse
import contextlib
import importlib
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError as failure:
    sys.exit(f"{sys.executable} has no torch: {failure}")

ROOT = Path(__file__).parents[1]
ERRORS = {torch.bfloat16: 0.02, torch.float32: 5e-3}  # against float64, at most
PACKAGES = ("triton", "transformers", "accelerate", "peft", "pydantic", "mamba_ssm", "causal_conv1d", "flash_attn", "kernels")


class Record:
    """A file of JSON lines, each written when it is known."""

    def __init__(self, path: Path, device: str, small: bool):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8")
        self.device, self.small, self.failed, self.part = torch.device(device), small, 0, ""

    def say(self, name: str, **values: Any) -> None:
        line = json.dumps({"part": self.part, "name": name, **values}, default=str)
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """What fails within is a line of the record, and ends nothing else."""
        try:
            yield
        except Exception as failure:
            self.failed += 1
            place = [
                f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(failure.__traceback__)[-4:]
            ]
            self.say(name, failed=f"{type(failure).__name__}: {str(failure)[:300]}", at=" < ".join(reversed(place)))

    def tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype)

    def milliseconds(self, run: Callable[[], Any], rounds: int = 10) -> float:
        """The median of some rounds, after two that are not counted."""
        times = []
        for i in range(2 if self.small else rounds + 2):
            self.wait()
            began = time.perf_counter()
            run()
            self.wait()
            if i > 1 or self.small:
                times.append(time.perf_counter() - began)
        return round(sorted(times)[len(times) // 2] * 1e3, 3)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def versions(record: Record) -> None:
    record.say(
        "machine", python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda, date=time.strftime("%F")
    )
    if record.device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        shared = getattr(properties, "shared_memory_per_block_optin", None)
        record.say("card", card=properties.name, memory=properties.total_memory, shared_memory_per_block=shared)
    for package in PACKAGES:
        try:
            module = importlib.import_module(package)
            if module.__file__ is None:  # a folder that is called so, as ours is
                raise ModuleNotFoundError(f"No module named '{package}'")
            record.say(package, version=getattr(module, "__version__", "?"))
        except Exception as failure:
            record.say(package, absent=f"{type(failure).__name__}: {str(failure)[:120]}")
    with record.attempt("wanted"):
        from packaging.requirements import Requirement

        for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
            wanted, here = Requirement(text), None
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                here = importlib.metadata.version(wanted.name)
            if here is None or not wanted.specifier.contains(here, prereleases=True):
                record.say("wanted", package=text, here=here)


def backends(record: Record) -> None:
    from surgery.kernels.explain import SMALL, Sizes, make_calls
    from surgery.kernels.functions import as_tuple

    for dtype in (torch.bfloat16, torch.float32):
        for name, operation, args in make_calls(record.device, dtype, SMALL if record.small else Sizes()):
            for learning in (False, True) if operation.differentiable else (False,):
                with record.attempt(f"{name} {dtype} grad={learning}"), warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    own = [
                        m.clone().requires_grad_(learning and m.is_floating_point()) if isinstance(m, torch.Tensor) else m
                        for m in args
                    ]
                    if name.endswith("of a part"):
                        own[0] = args[0].detach().requires_grad_(learning)
                    began = time.perf_counter()
                    chosen = operation.choose(*own)
                    results = as_tuple(operation(*own))
                    if learning:
                        torch.autograd.grad(
                            results[0].float().square().sum(),
                            [m for m in own if isinstance(m, torch.Tensor) and m.requires_grad],
                            allow_unused=True,
                        )
                    record.wait()
                    seconds = time.perf_counter() - began
                    exact = [m.double() if isinstance(m, torch.Tensor) and m.is_floating_point() else m for m in args]
                    with torch.no_grad():
                        truth = as_tuple(operation.reference.run(*exact))[0]
                    error = ((results[0].double() - truth).norm() / truth.norm()).item()
                    asked = [each for each in operation.backends.values() if not each.on_request]
                    why = {each.name: reason for each in asked if (reason := operation.why_not(each, *own))}
                    line = {"serves": chosen.name, "seconds": round(seconds, 2), "error": error, "not": why}
                    if said:
                        line["warnings"] = [str(each.message)[:300] for each in said]
                    record.say(f"{name} {str(dtype)[6:]} {'with gradient' if learning else 'forward'}", **line)
                    refused = [reason for reason in why.values() if reason in operation.refused.values()]
                    if broken := [reason for reason in refused if not reason.startswith("ModuleNotFoundError")]:
                        raise RuntimeError(f"what is installed does not serve: {broken}")
                    if not error < ERRORS[dtype]:
                        raise ArithmeticError(f"{chosen.name} is off by {error:.2g}")


def smoke(record: Record) -> None:
    import surgery
    from surgery.records.recipe import Tune

    model, tokenizer = surgery.load(str(ROOT / "checkpoints" / "tiny-mamba2"), device=str(record.device), dtype="float32")[:2]
    ids = torch.arange(40, device=record.device)[None] % model.config.vocab_size
    with torch.no_grad():
        here = model(input_ids=ids, use_cache=False).logits.float().cpu()
        cpu = surgery.load(str(ROOT / "checkpoints" / "tiny-mamba2"), device="cpu", dtype="float32")[0]
        there = cpu(input_ids=ids.cpu(), use_cache=False).logits
    difference = (here - there).abs().max().item()
    record.say("base logits against the CPU", largest_difference=difference)
    record.failed += not difference < 1e-3
    with record.attempt("locate"):
        from surgery.probes import make_probe

        began = time.perf_counter()
        questions = make_probe("kv", tokenizer, pairs=8).questions(16, 0)
        ranking = surgery.locate(model, tokenizer, questions)
        record.say("locate", leads=str(ranking.heads[0].site), seconds=round(time.perf_counter() - began, 2))
    hybrid = surgery.splice(model, surgery.Plan(sites=(surgery.Site(1, (0,)), surgery.Site(2, (3,)))))
    with record.attempt("tune"):
        began = time.perf_counter()
        options = Tune(steps=5, batch_size=4, text_batch_size=4, text_tokens=256)
        log = surgery.tune(hybrid, tokenizer, options, surgery.Data(), seed=0)
        record.say("tune", steps=log.steps, seconds=round(time.perf_counter() - began, 2))
    with record.attempt("generate"), torch.no_grad():
        hybrid.eval()
        began = time.perf_counter()
        tokens = hybrid.generate(ids, max_new_tokens=24, do_sample=False)
        seconds = time.perf_counter() - began
        again = ids
        for _ in range(24):
            again = torch.cat([again, hybrid(input_ids=again, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        same = (tokens == again).float().mean().item()
        record.say("generate", as_without_cache=same, seconds=round(seconds, 2))
        record.failed += same < 1


def shape(record: Record, layers: int, width: int) -> Any:
    """A hybrid of random weights at a published width, with three heads grafted in its middle layer."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    import surgery

    width = 64 if record.small else width
    sizes: dict[str, Any] = {"head_dim": 16, "state_size": 16} if record.small else {"head_dim": 64, "state_size": 128}
    config = Mamba2Config(
        hidden_size=width, num_hidden_layers=layers, num_heads=2 * width // sizes["head_dim"], n_groups=1,
        vocab_size=512 if record.small else 50288, **sizes,
    )  # fmt: skip
    with torch.device(record.device):
        base: Any = Mamba2ForCausalLM(config)
        base = base.to(torch.bfloat16 if record.device.type == "cuda" else torch.float32)
    return surgery.splice(base, surgery.Plan(sites=(surgery.Site(layers // 2, (0, 1, 2)),)))


def step(record: Record) -> None:
    """A step of KL on text, as tuning takes it: teacher, student, backward, for rows of one document and of five."""
    from surgery.tuning.losses import kl_divergence

    b, t = (2, 64) if record.small else (8, 2048)
    for layers, width in ((24, 768), (8, 2560)):
        name = f"{layers} layers of width {width}"
        with record.attempt(name):
            hybrid = shape(record, 2 if record.small else layers, width)
            learns = [p for p in hybrid.parameters() if p.requires_grad]
            ids = torch.randint(0, hybrid.config.vocab_size, (b, t), device=record.device)
            documents = torch.arange(t, device=record.device) % (t // 5 + 1)
            for packed in (False, True):
                more = {"position_ids": documents.expand(b, t)} if packed else {}

                def take(hybrid: Any = hybrid, more: Any = more, learns: Any = learns, ids: Any = ids) -> None:
                    with torch.no_grad(), hybrid.disable_grafts():
                        teacher = hybrid(input_ids=ids, use_cache=False, **more).logits
                    student = hybrid(input_ids=ids, use_cache=False, **more).logits
                    loss = kl_divergence(student.flatten(0, 1), teacher.flatten(0, 1)) / ids.numel()
                    torch.autograd.grad(loss, learns)

                ms = record.milliseconds(take, rounds=5)
                record.say(
                    f"{name}{', packed' if packed else ''}",
                    ms=ms,
                    tokens_per_second=round(b * t / ms * 1e3),
                    **profile(record, take),
                )


def profile(record: Record, run: Callable[[], Any]) -> dict[str, Any]:
    """How many kernels a call launches, how long the GPU is busy, waits of the host, and the ten longest kernels."""
    if record.device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    with watch(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    rows = seen.key_averages()
    kernels = [row for row in rows if row.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(row.self_device_time_total for row in kernels) / 1e3
    top = sorted(kernels, key=lambda row: -row.self_device_time_total)[:10]
    waits = sum(
        row.count for row in rows if row.key in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::_local_scalar_dense")
    )
    return {
        "launches": sum(row.count for row in kernels),
        "busy_ms": round(busy, 2),
        "waits": waits,
        "top": [[row.key[:60], row.count, round(row.self_device_time_total / 1e3, 2)] for row in top],
    }


def attention(record: Record) -> None:
    import torch.nn.functional as F

    from surgery.kernels.attention import attend

    w, p = 128, 64
    sizes = [(2, 3, 128)] if record.small else [(8, 1, 2048), (8, 3, 2048), (8, 80, 2048), (2, 80, 8192), (1, 3, 32768)]
    for b, h, t in sizes:
        q, k = (record.tensor(b, h, t, w) * w**-0.25 for _ in range(2))
        v, bias, null = (
            record.tensor(b, h, t, p),
            record.tensor(b, h, t, dtype=torch.float32),
            record.tensor(h, dtype=torch.float32),
        )
        inputs = [m.requires_grad_() for m in (q, k, v, bias, null)]
        flops = b * h * t * t * (w + p)  # causal, a multiplication and an addition each

        def both(**more: Any) -> None:
            y, m = attend(*inputs, **more)
            torch.autograd.grad(y.float().sum() + m.sum(), inputs)

        same = F.pad(v.detach(), (0, w - p)).requires_grad_()

        def torchs() -> None:
            y = F.scaled_dot_product_attention(q, k, same, is_causal=True, scale=1.0)
            torch.autograd.grad(y.float().sum(), [q, k, same])

        with record.attempt(f"{b} x {h} pairs x {t} tokens"):
            line: dict[str, Any] = {}
            with torch.no_grad():
                line["ms"] = record.milliseconds(lambda: attend(*inputs))
                torchs_forward = partial(F.scaled_dot_product_attention, q, k, same, is_causal=True, scale=1.0)
                line["torch_ms"] = record.milliseconds(torchs_forward)
            line["tflops"] = round(flops / line["ms"] / 1e9, 1)
            line["both_ms"], line["both_torch_ms"] = record.milliseconds(both), record.milliseconds(torchs)
            record.say(f"{b} x {h} pairs x {t} tokens", **line)


def scans(record: Record) -> None:
    from surgery.kernels.explain import SMALL, Sizes, make_calls

    for name, operation, args in make_calls(record.device, torch.bfloat16, SMALL if record.small else Sizes()):
        if name.startswith("attend"):
            continue
        for backend in operation.backends.values():
            if backend is operation.reference and len(operation.backends) > 2 and "step" not in name and "conv" not in name:
                continue
            if backend.on_request or operation.why_not(backend, *args):
                continue
            with record.attempt(f"{name} {backend.name}"), torch.no_grad():
                record.say(f"{name} {backend.name}", ms=record.milliseconds(lambda: backend.run(*args)))


def memory(record: Record) -> None:
    hybrid = shape(record, 2, 2560)
    for t in (64,) if record.small else (1024, 4096, 16384, 65536):
        with record.attempt(f"{t} tokens"):
            ids = torch.randint(0, hybrid.config.vocab_size, (1, t), device=record.device)
            line = {}
            for backward in (False, True):
                if record.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                with torch.set_grad_enabled(backward):
                    hidden = hybrid.backbone(input_ids=ids, use_cache=False).last_hidden_state
                    if backward:
                        hidden.float().sum().backward()
                if record.device.type == "cuda":
                    line["with_gradient_gib" if backward else "forward_gib"] = round(
                        torch.cuda.max_memory_allocated() / 2**30, 2
                    )
            record.say(f"{t} tokens", **line)


def tests(record: Record) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/kernels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    record.say("pytest -m gpu", status=done.returncode, output=done.stdout[-1500:])
    record.failed += done.returncode > 0


PARTS = {part.__name__: part for part in (versions, backends, smoke, step, attention, scans, memory, tests)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu.jsonl")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--quick", action="store_true", help="mamba_ssm tries two configurations of each kernel, not dozens")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        print("no GPU that torch can use is here (a driver older than torch's CUDA counts as none); --rehearse runs on the CPU")
        return 2
    if options.quick:
        with contextlib.suppress(ImportError):
            from surgery.kernels.choose import import_alone

            import_alone("mamba_ssm.utils.determinism").autotune_configs = lambda configs: configs[1:2] + configs[-1:]
    record = Record(options.out, "cpu" if options.rehearse else "cuda", options.rehearse)
    began = time.monotonic()
    for name in options.only:
        record.part = name
        if time.monotonic() - began > options.seconds:
            record.say("out of time")
            break
        start = time.monotonic()
        with record.attempt(name):
            PARTS[name](record)
        record.say("done", seconds=round(time.monotonic() - start, 1))
    return int(record.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
