"""What is interrupted: each verb that writes, as one call of the command line on the smallest models, and how it goes on."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml

from surgery.exporting.formats import names
from surgery.jobs.interruption import RESUMABLE
from surgery.records.record import code_digest

LOCATE = ["locate.exact=true", "locate.examples=4", "locate.options.pairs=2"]
TUNE = [
    "tune.steps=4", "tune.save_steps=2", "tune.batch_size=2", "tune.text_batch_size=1", "tune.text_tokens=16",
    "tune.lessons=[{options: {pairs: [2, 3]}}]",
]  # fmt: skip
AUTO = [
    "plan.heads=auto", "plan.auto={examples: 2, windows: 1, candidates: 1, max_heads: 2, gates: [1.0]}",
    "tune.steps=auto", "tune.max_steps=6",
]  # fmt: skip
KEEP = ["tune.early_stopping={eval_steps: 1, examples: 2, windows: 1, accuracy: 1.0, perplexity: 9.0}"]
LORA = ["tune.lora={target_modules: [in_proj], r: 2}"]
BENCH = ["bench.pairs=[2]", "bench.limit=4", "bench.windows=1", "bench.window=16", "bench.contexts=[]"]


@dataclass(frozen=True)
class Case:
    """One call. before: a folder of the inputs -> where its copy lies when the call begins. out: what is the old folder or the
    new as a whole at every moment. again: options of the call that goes on, where that is not --resume."""

    name: str
    arguments: list[str]
    before: dict[str, str] = field(default_factory=dict)
    out: str | None = None
    again: list[str] = field(default_factory=list)

    @property
    def goes_on(self) -> list[str]:
        """The arguments of the call that goes on. What overwrites begins anew."""
        if "--overwrite" in self.arguments:
            return self.arguments
        return [*self.arguments, *(["--resume"] if self.arguments[0] in RESUMABLE else self.again)]


def settings(*groups: list[str]) -> list[str]:
    return [part for group in groups for value in group for part in ("--set", value)]


def cases(inputs: Path) -> list[Case]:
    """All of them; `inputs` is a folder that prepare() has filled."""
    base, spliced, other = (str(inputs / name) for name in ("base", "spliced", "other"))
    ranking, plan = str(inputs / "located" / "ranking.json"), str(inputs / "plan.json")
    run, tune = ["run", str(inputs / "run.yaml"), "--out", "out"], ["tune", spliced, "--out", "out"]
    plans, pretrain = ["plan", ranking, "--out", "plan.json"], ["pretrain", str(inputs / "pretrain.yaml"), "--out", "out"]
    old = {"other": "out"}
    made = [
        Case("run", run, out="out/hybrid"),
        Case("run, controls and LoRA", ["run", str(inputs / "whole.yaml"), "--out", "out"], out="out/hybrid"),
        Case("run, heads and steps auto", ["run", str(inputs / "auto.yaml"), "--out", "out"], out="out/hybrid"),
        Case("run over an earlier", [*run, "--overwrite"], {"run": "out"}, "out/hybrid"),
        Case("study, seeds", ["run", str(inputs / "seeds.yaml"), "--out", "out"]),
        Case("study, KV sweep", ["run", str(inputs / "sweep.yaml"), "--out", "out"]),
        Case("locate", ["locate", base, "--out", "out", *settings(LOCATE)]),
        Case("locate, seeds", ["locate", base, "--out", "out", *settings(LOCATE, ["locate.seeds=2"])]),
        Case("plan", plans),
        Case("plan over an earlier", [*plans, "--set", "plan.heads=2"], {"plan.json": "plan.json"}),
        Case("splice", ["splice", base, plan, "--out", "out"], out="out", again=["--overwrite"]),
        Case("splice over an earlier", ["splice", base, plan, "--out", "out", "--overwrite"], old, "out"),
        Case("tune", [*tune, *settings(TUNE)], out="out"),
        Case("tune, early stopping", [*tune, *settings(TUNE, KEEP)], out="out"),
        Case("tune, LoRA", [*tune, *settings(TUNE, LORA)], out="out"),
        Case("tune over an earlier", [*tune, *settings(TUNE), "--overwrite"], old, "out"),
        Case("bench", ["bench", base, spliced, other, "--out", "out", *settings(BENCH)]),
        Case("prune", ["prune", base, "--out", "out", *settings(LOCATE[1:])], again=["--overwrite"]),
        Case("pretrain", pretrain, out="out"),
        Case("pretrain over an earlier", pretrain, {"pretrained": "out"}, "out"),
    ]  # fmt: skip
    for form in names():
        if form == "gguf" and "LLAMA_CPP" not in os.environ:
            continue  # llama.cpp's converter is no package; what it adds to the folder of nemotron_h is one file
        source = spliced if form in ("hf", "patch") else str(inputs / "layered")
        call = ["export", source, "--out", "out", "--format", form]
        made.append(Case(f"export, {form}", call, out="out", again=["--overwrite"]))
        made.append(Case(f"export, {form} over an earlier", [*call, "--overwrite"], old, "out"))
    return made


def prepare(inputs: Path, call: Callable[..., None]) -> None:
    """Make the inputs, if they are not there by this code. call: the command line with these arguments, in their folder."""
    ready = inputs / "ready"
    if ready.exists() and ready.read_text() == code_digest():
        return
    shutil.rmtree(inputs, ignore_errors=True)
    inputs.mkdir(parents=True)
    write_base(inputs / "base")
    plain = {"model": str(inputs / "base"), **section(LOCATE, TUNE, BENCH, ["bench.controls=false"])}
    recipes = {
        "run": plain,
        "earlier": section(["seed=7"], base=plain),
        "whole": section(["bench.controls=true", "bench.random_sites=1", *LORA], base=plain),
        "auto": section(AUTO, base=plain),
        "seeds": section(["study={name: seeds, seeds: 1, ways: {tuned: {}}}"], base=plain),
        "sweep": section(["study={name: kv_sweep, layers: 2, pairs: [2], gather: L0.H1, aggregate: L1.H1}"], base=plain),
        "pretrain": {
            "architecture": ARCHITECTURE, "steps": 3, "first_layer_steps": 2, "warmup_steps": 1, "examples": 4, "kv_targets": 4,
            "text_sequences": 1, "text_sentences": 2, "letter_sequences": 1, "queries": 2,
        },
    }  # fmt: skip
    for name, tree in recipes.items():
        (inputs / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    call("locate", "base", "--out", "located", *settings(LOCATE))
    call("plan", "located/ranking.json", "--out", "plan.json")
    call("plan", "located/ranking.json", "--out", "other.json", "--set", "plan.sites=L1.H1,2")
    call("plan", "located/ranking.json", "--out", "layered.json", "--set", "plan.kind=layer")
    for name in ("plan", "other", "layered"):
        call("splice", str(inputs / "base"), f"{name}.json", "--out", "spliced" if name == "plan" else name)
    call("run", "earlier.yaml", "--out", "run")
    call("pretrain", "pretrain.yaml", "--out", "pretrained")
    ready.write_text(code_digest())


def section(*groups: list[str], base: dict | None = None) -> dict:
    """A tree of a recipe in which the settings, as --set takes them, are set."""
    tree: dict = yaml.safe_load(yaml.safe_dump(base or {}))
    for setting in (setting for group in groups for setting in group):
        key, _, value = setting.partition("=")
        *path, last = key.split(".")
        place = tree
        for name in path:
            place = place.setdefault(name, {})
        place[last] = yaml.safe_load(value)
    return tree


ARCHITECTURE = {
    "model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 8,
    "n_groups": 1, "chunk_size": 16, "tie_word_embeddings": True,
}  # fmt: skip


def write_base(folder: Path) -> None:
    """A Mamba-2 of two layers with random weights and the small world's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from surgery.world.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    special = {f"{name}_token_id": tokenizer.eos_token_id for name in ("pad", "bos", "eos")}
    fields = {name: value for name, value in ARCHITECTURE.items() if name != "model_type"}
    config = AutoConfig.for_model("mamba2", vocab_size=-(-len(tokenizer) // 16) * 16, **special, **fields)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
