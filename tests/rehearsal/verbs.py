"""Runs whole verbs on the GPU that is none (values.py) and on the CPU, and prints a line of JSON for each: what came of it, how
far the two are apart, and where the host waited. Then it plants faults. A process of its own, for test_verbs.py:
python -m tests.rehearsal.verbs [dtype ...]"""

import contextlib
import dataclasses
import json
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # replaced for each run; without it accelerate looks for a GPU of its own

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from surgery.evaluation.bench import bench
from surgery.exporting.export import export
from surgery.kernels.dispatch import Operation, use
from surgery.locating.locate import locate
from surgery.locating.planning import plan
from surgery.locating.subject import Subject
from surgery.probes.knowledge import Knowledge
from surgery.records.plan import Plan
from surgery.records.recipe import Bench, Locate, Tune
from surgery.records.site import Site
from surgery.splicing.load import load
from surgery.splicing.splice import adopt, graft_parameters, splice, unsplice
from surgery.studies.kv_sweep import kv_sweep
from surgery.studies.prune import prune
from surgery.tuning.loop import tune
from surgery.world.tokenizer import build_tokenizer
from tests.models import random_base, random_llamba, random_selective
from tests.rehearsal.values import NAME, Rules, on_device, register

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
STEPS = 3
# Family -> its base, and where a hybrid has grafts.
FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    "mamba2": (partial(random_base, num_hidden_layers=2), "L1.H1,4"),
    "mamba": (partial(random_selective, MambaConfig, MambaForCausalLM, num_hidden_layers=2), "L1.H0,3,4,9"),
    "falcon_mamba": (partial(random_selective, FalconMambaConfig, FalconMambaForCausalLM, num_hidden_layers=2), "L1.H0,3,4,9"),
    "llamba": (partial(random_llamba, n_layer=2), "L1.H1,4"),
}


@dataclasses.dataclass
class Place:
    """Where a verb runs, and with what. base() makes the same model every time."""

    device: str
    dtype: torch.dtype
    folder: Path
    tokenizer: Any

    def base(self) -> Any:
        made = random_base(vocab_size=-(-len(self.tokenizer) // 16) * 16, num_hidden_layers=2)
        return made.to(self.dtype).to(self.device)

    def hybrid(self) -> Any:
        return splice(self.base(), Plan(sites=("L1.H3",), blend=0.5))


def passes(place: Place, family: str) -> Any:
    """What all verbs ask of a base and of a hybrid: forward passes, decoding, and a backward pass to every tensor."""
    make, sites = FAMILIES[family]
    results = []
    for grafted in (False, True):
        base = make().to(place.dtype).to(place.device)
        model = splice(base, Plan(sites=(sites,))) if grafted else adopt(base)
        results.append((decode(model), learn(model)))
    return results


@torch.no_grad()
def decode(model: Any) -> list[Tensor]:
    """A prompt, and steps of decoding with the mask that generate passes: the host neither waits nor sends a tensor."""
    ids, cache = torch.arange(22, device=model.device).view(2, 11), DynamicCache(config=model.config)
    with strictly("sync", "float32"):
        logits = [model(input_ids=ids, cache_params=cache, use_cache=True).logits]
        for step in range(2):
            mask = torch.ones(2, 12 + step, dtype=torch.long, device=model.device)
            with strictly("host"):
                answer = model(input_ids=ids[:, step : step + 1], cache_params=cache, use_cache=True, attention_mask=mask)
            logits.append(answer.logits)
    return logits


def learn(model: Any) -> Tensor:
    model.train().requires_grad_(True)
    ids = torch.arange(22, device=model.device).view(2, 11)
    with strictly("sync", "float32"):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    for name, p in model.named_parameters():
        if p.grad is not None and (p.grad.dtype, p.grad.device) != (p.dtype, p.device):
            raise AssertionError(f"the gradient of {name} is in {p.grad.dtype} on {p.grad.device}")
    return loss


@contextlib.contextmanager
def strictly(*kinds: str) -> Iterator[None]:
    """Within, none of these happens, either."""
    before, Rules.strict = Rules.strict, Rules.strict | {*kinds}
    try:
        yield
    finally:
        Rules.strict = before


def locating(place: Place, **options: Any) -> Any:
    given = {"examples": 6, "options": {"pairs": 4}, "batch_size": 3, "name": "base", **options}
    return [list(head.model_dump().values()) for head in locate(place.base(), place.tokenizer, **given).heads]


def planning(place: Place) -> Any:
    ranking = locate(place.base(), place.tokenizer, examples=4, options={"pairs": 4}, exact=False, name="base")
    return [str(site) for site in plan(ranking, heads=1).sites]


def splicing(place: Place) -> Any:
    hybrid = place.hybrid()
    ids = torch.arange(20, device=place.device).view(2, 10)
    logits = hybrid(input_ids=ids, use_cache=False).logits
    return logits, unsplice(hybrid)(input_ids=ids, use_cache=False).logits


def packing(place: Place) -> Any:
    """Rows that hold documents, told by their positions alone."""
    ids = torch.arange(20, device=place.device).view(2, 10)
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2], [*range(6), *range(4)]], device=place.device)
    return place.hybrid()(input_ids=ids, position_ids=places, use_cache=False).logits


def tuning(place: Place, steps: int = STEPS, **options: Any) -> Any:
    hybrid = place.hybrid()
    lessons = ({"probe": "kv", "options": {"pairs": 4}},)
    chosen = Tune.model_validate(
        {
            "steps": steps, "batch_size": 2, "lessons": lessons, "text_batch_size": 2, "text_tokens": 16, "save_steps": 2,
            **options,
        }
    )  # fmt: skip
    log = tune(hybrid, place.tokenizer, chosen, out=place.folder / "tuned" if options.get("lora") else None)
    return [record["loss"] for record in log if "loss" in record], *graft_parameters(hybrid).values()


def benching(place: Place) -> Any:
    options = Bench(
        suites=("quick", "speed"), pairs=(4,), limit=4, windows=2, window=16, contexts=(16,), batches=(2,), batch_size=4
    )
    report = bench({"base": place.base(), "hybrid": place.hybrid()}, tokenizer=place.tokenizer, options=options)
    return [{name: result.model_dump() for name, result in model.results().items()} for model in report.models.values()]


def exporting(place: Place) -> Any:
    place.base().to("cpu").save_pretrained(place.folder / "base")
    place.tokenizer.save_pretrained(place.folder / "base")
    opened = load(place.folder / "base")
    hybrid = splice(opened.model.to(place.device), Plan(sites=("L1.H3",)))
    proof = export(hybrid, place.folder / "out", tokenizer=place.tokenizer, plan=Plan(sites=("L1.H3",)), verify="tensors")
    return list(graft_parameters(load(place.folder / "out").model).values()) if proof else None


def pruning(place: Place) -> Any:
    subject = Subject.of(place.base(), place.tokenizer, "base")
    options = Locate(examples=4, options={"pairs": 4}, batch_size=4)
    pruned = prune(subject, options, Knowledge(), gather=[Site(0, (1,))], aggregate=[Site(1, (2,))])
    return pruned.model_dump(exclude={"provenance"})


def sweeping(place: Place) -> Any:
    subject = Subject.of(place.base(), place.tokenizer, "base")
    curves = kv_sweep(subject, [4], {"heads": [Site(1, (2,))]}, examples=4, controls=1)
    return [curve.model_dump() for curve in curves]


VERBS: dict[str, Callable[[Place], Any]] = {
    **{family: partial(passes, family=family) for family in FAMILIES},
    "locate exact": lambda place: locating(place, exact=True),
    "locate attribution": lambda place: locating(place, exact=False),
    "locate mean, layers": lambda place: locating(place, exact=True, ablation="mean", layers=True),
    "plan": planning,
    "splice": splicing,
    "packed rows": packing,
    "tune": tuning,
    "tune early stopping": lambda place: tuning(place, early_stopping={"eval_steps": 2, "examples": 4}),
    "tune checkpointing": lambda place: tuning(place, gradient_checkpointing=True, gradient_accumulation_steps=2),
    "tune bf16": lambda place: tuning(place, mixed_precision="bf16"),
    "tune lora": lambda place: tuning(place, lora={"target_modules": ["in_proj"], "r": 2}),
    "bench": benching,
    "export": exporting,
    "prune": pruning,
    "sweep": sweeping,
}


@contextlib.contextmanager
def noting(chosen: dict[str, str]) -> Iterator[None]:
    """Within, notes which backend serves each operation."""
    choose = Operation.choose

    def noted(self: Operation, *args: Any, backend: str | None = None) -> Any:
        result = choose(self, *args, backend=backend)
        chosen[self.name] = result.name
        return result

    Operation.choose = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Operation.choose = choose  # type: ignore[method-assign]


@contextlib.contextmanager
def no_waiting_inside_models() -> Iterator[None]:
    """The forward pass of a model's blocks never waits for the device, but for one look at whether a row holds documents."""
    hooks = torch.nn.modules.module
    kept: list[frozenset[str]] = []
    Rules.known = ("surgery/hybrids/packed.py",)

    def enter(module: Any, _: Any) -> None:
        if backbone(module):
            kept.append(Rules.strict)
            Rules.strict = Rules.strict | {"sync"}

    def backbone(module: Any) -> bool:  # hooks of the whole model belong to who measures it
        return isinstance(module, PreTrainedModel) and hasattr(module, "layers")

    def leave(module: Any, *_: Any) -> None:
        if backbone(module):
            Rules.strict = kept.pop()

    handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def anew(device: str) -> None:
    """accelerate's state is the process's: the next run has another device."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state()
    PartialState._reset_state()
    os.environ["ACCELERATE_TORCH_DEVICE"] = device


def on_both(verb: Callable[[Place], Any], dtype: torch.dtype, tokenizer: Any) -> tuple[Any, Any, Counter]:
    """What a verb gives on the device and on the CPU, and where the host waited."""
    chosen: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        anew(f"{NAME}:0")
        with on_device(dtype) as rules, noting(chosen), no_waiting_inside_models():
            result = to_host(verb(Place(f"{NAME}:0", dtype, Path(folder), tokenizer)))
            counted = rules.counted
    with tempfile.TemporaryDirectory() as folder, use(**chosen):
        anew("cpu")
        expected = to_host(verb(Place("cpu", dtype, Path(folder), tokenizer)))
    return result, expected, counted


def to_host(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach().cpu()
    if isinstance(result, dict):
        return {name: to_host(value) for name, value in result.items()}
    return [to_host(value) for value in result] if isinstance(result, list | tuple) else result


def apart(result: Any, expected: Any) -> float:
    """The largest difference of a number; infinity where anything else differs."""
    if isinstance(result, dict):
        return apart(list(result.values()), list(expected.values())) if result.keys() == expected.keys() else float("inf")
    if isinstance(result, list):
        if len(result) != len(expected):
            return float("inf")
        return max([0.0, *(apart(a, b) for a, b in zip(result, expected, strict=True))])
    if isinstance(result, Tensor):
        return (result.double() - expected.double()).abs().max().item() if result.shape == expected.shape else float("inf")
    if isinstance(result, float):
        return 0.0 if result == expected or (math.isnan(result) and math.isnan(expected)) else abs(result - expected)
    return 0.0 if result == expected else float("inf")


def plant(model: Any, fault: str) -> None:
    """A fault in the last mixer's `finish`."""
    mixer = model.backbone.layers[-1].mixer
    finish = mixer.finish

    def copied(y: Tensor, gate: Tensor) -> Tensor:
        return finish(y.cpu().to(gate.device), gate)

    def elsewhere(y: Tensor, gate: Tensor) -> Tensor:
        return finish(y * torch.ones(y.shape[-1]), gate)

    def looked_at(y: Tensor, gate: Tensor) -> Tensor:
        return finish(y if y.sum() > 0 else -y, gate)

    def wide(y: Tensor, gate: Tensor) -> Tensor:
        return torch.nn.functional.linear(y.flatten(-2).float(), mixer.out_proj.weight.float()).to(gate.dtype)

    def listed(y: Tensor, gate: Tensor) -> Tensor:
        return finish(y[:, :, [*range(y.shape[2])]], gate)

    mixer.finish = {"cpu": copied, "elsewhere": elsewhere, "sync": looked_at, "float32": wide, "list": listed}[fault]


def planted(fault: str, tokenizer: Any) -> str:
    """What the rehearsal says of decoding by a hybrid with a fault."""
    anew(f"{NAME}:0")
    with on_device(torch.bfloat16):
        hybrid = Place(f"{NAME}:0", torch.bfloat16, Path(), tokenizer).hybrid()
        plant(hybrid, fault)
        return outcome(lambda: decode(hybrid))


def outcome(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:  # what is found is the result
        if os.environ.get("REHEARSAL_TRACE"):
            import traceback

            traceback.print_exc()
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "ok"


def main(asked: list[str]) -> None:
    tokenizer = build_tokenizer()
    names = [name for name in asked if name in VERBS] or list(VERBS)
    for name in names:
        for kind in [kind for kind in asked if kind in DTYPES] or DTYPES:
            line: dict[str, Any] = {"verb": name, "dtype": kind}

            def run(name: str = name, kind: str = kind, line: dict[str, Any] = line) -> None:
                result, expected, counted = on_both(VERBS[name], DTYPES[kind], tokenizer)
                line["apart"] = apart(result, expected)
                line["counted"] = {f"{what} {where}": number for (what, where), number in sorted(counted.items())}

            line["outcome"] = outcome(run)
            print(json.dumps(line), flush=True)
    for fault in ("cpu", "elsewhere", "sync", "float32", "list"):
        print(json.dumps({"planted": fault, "outcome": planted(fault, tokenizer)}), flush=True)


if __name__ == "__main__":
    register()
    main(sys.argv[1:])
