"""How fast compiled models decode: a hybrid of the built-in checkpoint against its base in stock transformers, both by
torch.compile, in one run: python -m tools.bench_compile. Prints the time of a step, the fastest of some rounds, and ratios."""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from surgery.records.plan import Plan
from surgery.splicing.splice import splice

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "tiny-mamba2"
SITES = ("L1.H0", "L2.H5")
PROMPT, STEPS, ROUNDS = 64, 10, 30


class Decoder:
    """A model that decodes after a prompt, compiled or as it is."""

    def __init__(self, model: Any, compiled: bool):
        self.model, self.run = model, torch.compile(model, fullgraph=True) if compiled else model
        self.token = torch.ones(1, 1, dtype=torch.long)

    def start(self) -> None:
        self.cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(input_ids=torch.ones(1, PROMPT, dtype=torch.long), cache_params=self.cache, use_cache=True)

    def milliseconds(self) -> float:
        """Of a step, of STEPS after a prompt."""
        self.start()
        with torch.no_grad():
            begin = time.perf_counter()
            for _ in range(STEPS):
                self.run(input_ids=self.token, cache_params=self.cache, use_cache=True)
            return (time.perf_counter() - begin) / STEPS * 1e3


def main() -> None:
    base = AutoModelForCausalLM.from_pretrained(CHECKPOINT).eval()
    hybrid = splice(base, Plan.model_validate({"sites": SITES}))
    contenders = {
        "hybrid, compiled": Decoder(hybrid, True), "stock base, compiled": Decoder(base, True),
        "hybrid": Decoder(hybrid, False), "stock base": Decoder(base, False),
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for decoder in contenders.values():
        decoder.milliseconds()  # compiles, for one length and then for all
    for _ in range(ROUNDS):  # in turns, so that a busy moment of the machine hits all
        for name, decoder in contenders.items():
            times[name].append(decoder.milliseconds())
    best = {name: min(values) for name, values in times.items()}
    for name, value in best.items():
        print(f"{name:24} {value:8.3f} ms a step")
    print(f"compiled hybrid over compiled stock base: {best['hybrid, compiled'] / best['stock base, compiled']:.2f}")
    print(f"compiled hybrid over eager stock base:    {best['hybrid, compiled'] / best['stock base']:.2f}")


if __name__ == "__main__":
    main()
