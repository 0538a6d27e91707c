"""What compiling gains, and what the dispatcher of kernels costs: python -m tools.bench_compile [--out recipes/compile.json]

A hybrid of the built-in checkpoint, the demo's two heads grafted, and its base in stock transformers, compiled and as they are:
the time of a decoded token, how many graphs it is, and how far float32 is from float64, each beside a bound that follows from
the number of roundings. Then a decoded token and a step of tuning, through the dispatcher and with the kernels that it chose
called directly. The contenders take turns in one run; the fastest of some rounds counts. Not for a record on a busy machine."""

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, DynamicCache

from surgery.kernels.dispatch import Operation
from surgery.records.plan import Plan
from surgery.records.record import environment
from surgery.splicing.splice import splice
from tools import bench_tuning
from tools.double import float64

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "tiny-mamba2"
SITES = ("L0.H3,5",)  # the demo's
PROMPT, STEPS, ROUNDS = 64, 10, 30
SURE = 6.0  # standard deviations


class Decoder:
    """A model that decodes after a prompt, compiled or as it is."""

    def __init__(self, model: Any, compiled: bool = False):
        self.model, self.run = model, torch.compile(model, fullgraph=True) if compiled else model

    def start(self) -> None:
        self.cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(input_ids=_tokens(0, PROMPT), cache_params=self.cache, use_cache=True)

    def step(self, number: int) -> torch.Tensor:
        """The logits after a token, (vocabulary)."""
        with torch.no_grad():
            return self.run(input_ids=_tokens(PROMPT + number, 1), cache_params=self.cache, use_cache=True).logits[0, -1]

    def milliseconds(self) -> float:
        """Of a step, of STEPS after a prompt."""
        self.start()
        begin = time.perf_counter()
        for number in range(STEPS):
            self.step(number)
        return (time.perf_counter() - begin) / STEPS * 1e3

    def logits(self) -> torch.Tensor:
        """(STEPS, vocabulary)."""
        self.start()
        return torch.stack([self.step(number) for number in range(STEPS)])


def _tokens(first: int, number: int) -> torch.Tensor:
    return (torch.arange(first, first + number)[None] * 37) % 1600 + 1


def errors(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return (logits.double() - exact).abs().max().item()


def rounding_bound(model: Any) -> float:
    """How far logits in float32 may be from those in float64, as the number of roundings says.

    A logit is a sum over hidden features, h . w. On the way to it come, layer after layer, the sums of a normalisation, of the
    projection into the mixer, of its convolution, over the state, over the text (the prompt and the steps) and of the
    projection out of it: n roundings one after the other, each of a relative size of at most u = 2^-24. Independent ones add up
    like their root (Higham and Mary, SIAM J. Sci. Comput. 41, 2019): the error is at most SURE sqrt(n) u times the sum of the
    magnitudes, |h| . |w|, with the largest h and w that there are after the last normalisation."""
    c = model.config
    inner = c.num_heads * c.head_dim
    n = (
        c.num_hidden_layers * (2 * c.hidden_size + c.conv_kernel + c.state_size + PROMPT + STEPS + 2 * inner)
        + 2 * c.hidden_size
    )
    weights = model.lm_head.weight.detach().double().abs()
    norm = model.backbone.norm_f.weight.detach().double().abs()
    # A normalised vector has a mean square of 1: |h| . |w| is at most the root of the width times |norm * w|.
    magnitude = c.hidden_size**0.5 * torch.linalg.vector_norm(weights * norm, dim=1).max().item()
    return SURE * n**0.5 * 2.0**-24 * magnitude


def in_double(model: Any) -> torch.Tensor:
    """The logits of a model that decodes in float64, norms, scans and softmax included."""
    with float64():
        return Decoder(copy.deepcopy(model).double()).logits()


def turns(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The least of every run's results; a busy moment of the machine hits all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run())
    return {name: round(min(values), 4) for name, values in times.items()}


def compiled_against_eager(rounds: int) -> dict[str, Any]:
    base = AutoModelForCausalLM.from_pretrained(CHECKPOINT).eval()
    hybrid = splice(base, Plan.model_validate({"sites": SITES, "blend": 0.1}))
    counters.clear()
    decoders = {"hybrid, compiled": Decoder(hybrid, True)}
    decoders["hybrid, compiled"].logits()
    graphs = counters["stats"]["unique_graphs"]
    decoders |= {
        "stock base, compiled": Decoder(base, True), "hybrid": Decoder(hybrid), "stock base": Decoder(base),
    }  # fmt: skip
    exact, exact_base = (in_double(model) for model in (hybrid, base))
    off = {name: errors(d.logits(), exact if "hybrid" in name else exact_base) for name, d in decoders.items()}
    times = turns({name: decoder.milliseconds for name, decoder in decoders.items()}, rounds)
    return {
        "graphs": graphs,
        "milliseconds": times,
        "compiled_hybrid_over_compiled_base": round(times["hybrid, compiled"] / times["stock base, compiled"], 3),
        "compiled_hybrid_over_eager_base": round(times["hybrid, compiled"] / times["stock base"], 3),
        "error_against_float64": off,
        "compiled_against_eager": errors(decoders["hybrid, compiled"].logits(), decoders["hybrid"].logits().double()),
        "largest_logit": exact.abs().max().item(),
        "rounding_bound": rounding_bound(hybrid),
    }


@contextmanager
def direct() -> Iterator[None]:
    """Within, an operation calls the backend that it chose the first time, without looking at its arguments."""
    chosen: dict[Operation, Any] = {}

    def call(self: Operation, *args: Any, backend: str | None = None) -> Any:
        if self not in chosen:
            chosen[self] = self.choose(*args, backend=backend)
        return chosen[self].run(*args)

    with patch.object(Operation, "__call__", call):
        yield


def dispatching(rounds: int) -> dict[str, Any]:
    """A decoded token, and a step of tuning, of the built-in shape, in milliseconds."""
    base = AutoModelForCausalLM.from_pretrained(CHECKPOINT).eval()
    decoder = Decoder(splice(base, Plan.model_validate({"sites": SITES, "blend": 0.1})))
    step = bench_tuning.graft_against_trainer(torch.device("cpu"))()["graft"]

    def tuned() -> float:
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3

    def directly(run: Callable[[], float]) -> Callable[[], float]:
        def measured() -> float:
            with direct():
                run()  # where the backends are chosen
                return run()

        return measured

    result = {}
    for name, run, times in (("decode", decoder.milliseconds, rounds), ("tune", tuned, max(3, rounds // 3))):
        run()
        both = turns({"dispatched": run, "direct": directly(run)}, times)
        result[name] = {"milliseconds": both, "overhead": round(both["dispatched"] / both["direct"] - 1, 4)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    record = {
        "environment": environment().model_dump(),
        "dispatching": dispatching(options.rounds),
        "compiled": compiled_against_eager(options.rounds),
    }
    text = json.dumps(record, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
