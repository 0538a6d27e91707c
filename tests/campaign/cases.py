"""The inputs of the campaign: from a kind and a generator, a folder with something bad in it and a command that reads it."""

import json
import math
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from surgery.cli.used_settings import USED
from surgery.records.recipe import Recipe
from surgery.records.sections.listing import keys
from tests.campaign.materials import SMALL
from tests.campaign.mutations import Mutator, dumped, replace

TENSORS = ("--verify", "tensors")
RECIPE = ("--recipe", "small.yaml")


@dataclass(frozen=True)
class Case:
    """kind, verb: for the table of the record. arguments: of the command. statuses: with which it may end."""

    kind: str
    verb: str
    arguments: tuple[str, ...]
    statuses: tuple[int, ...] = (0, 2)


class Bench:
    """Where a case is laid out: the good inputs, as links into the materials, among which some are then spoilt."""

    def __init__(self, materials: Path, folder: Path, rng: random.Random, pool: list[Any]):
        self.materials, self.folder, self.rng, self.mutator = materials, folder, rng, Mutator(rng, pool)
        folder.mkdir(parents=True)
        for path in materials.iterdir():
            (folder / path.name).symlink_to(path)

    def own(self, name: str) -> Path:
        """A copy of one of the inputs, to be changed."""
        path = self.folder / name
        if path.is_symlink():
            target = path.resolve()
            path.unlink()
            (shutil.copytree if target.is_dir() else shutil.copy)(target, path)
        return path

    def spoil(self, path: Path) -> None:
        """Spoil a file by what its name says it holds."""
        rng, mutator = self.rng, self.mutator
        if path.suffix == ".json":
            mutator.json_file(path)
        elif rng.random() < 0.08:
            mutator.file(path)
        elif path.suffix == ".safetensors" and rng.random() < 0.6:
            replace(path, header(path.read_bytes(), mutator))
        elif path.suffix in (".yaml", ".txt", ".jsonl", ".csv") and rng.random() < 0.7:
            replace(path, mutator.text(path.read_text()).encode("utf-8", "surrogatepass"))
        else:
            replace(path, mutator.bytes(path.read_bytes()))

    def spoil_rows(self, name: str) -> None:
        """Spoil one line, or a few, of a file of JSON lines."""
        path = self.own(name)
        lines = path.read_text().splitlines()
        for _ in range(self.rng.choice((1, 1, 4))):
            at = self.rng.randrange(len(lines))
            try:
                tree = json.loads(lines[at])
                changed = self.mutator.tree(tree) if self.rng.random() < 0.8 else self.mutator.value()
            except (ValueError, RecursionError):  # it is spoilt already, or too deep to be spoilt more
                continue
            lines[at] = dumped(changed).decode().replace("\n", "")
        replace(path, "\n".join(lines).encode())


def header(content: bytes, mutator: Mutator) -> bytes:
    """A safetensors file with another header, or with numbers that are none."""
    length = int.from_bytes(content[:8], "little")
    tree, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    if mutator.rng.random() < 0.25:
        at = mutator.rng.randrange(len(data) // 4) * 4
        data[at : at + 4] = struct.pack("<f", mutator.rng.choice((math.nan, math.inf, -math.inf, 3e38)))
        return content[: 8 + length] + bytes(data)
    changed = dumped(mutator.tree(tree))
    return len(changed).to_bytes(8, "little") + changed + bytes(data)


def setting(bench: Bench) -> Case:
    """--set KEY=VALUE, of any key."""
    rng, known = bench.rng, list(keys(Recipe))
    verb = rng.choice(("locate", "locate", "plan", "tune", "tune", "bench", "run", "splice", "prune"))
    used = [key for key in known if verb == "run" or any(f"{key}.".startswith(f"{name}.") for name in USED[verb])]
    key = rng.choice(used if rng.random() < 0.95 else known)
    value = bench.mutator.value() if rng.random() < 0.8 else bench.mutator.near(_default(key))
    try:
        text = rng.choice((yaml_text, json_text, str))(value)
    except RecursionError:  # of a nesting that Python itself cannot write
        text = 5000 * "[" + 5000 * "]"
    arguments = ("--set", f"{key}={text}".replace("\x00", "\\0").encode("utf-8", "replace").decode())
    return Case("settings", verb, (*command(verb), *arguments))


def recipe(bench: Bench) -> Case:
    """A recipe's file."""
    rng, path = bench.rng, bench.own("small.yaml")
    verb = rng.choice(("locate", "tune", "bench", "run", "run", "plan", "pretrain"))
    if rng.random() < 0.65:
        replace(path, yaml_text(bench.mutator.tree(SMALL)).encode("utf-8", "surrogatepass"))
    else:
        bench.spoil(path)
    return Case("recipes", verb, (*command(verb), *_sizes_left_out(path, verb)))


def plan(bench: Bench) -> Case:
    bench.spoil(bench.own("plan.json"))
    return Case("plans", "splice", command("splice"))


def ranking(bench: Bench) -> Case:
    bench.spoil(bench.own("located") / "ranking.json")
    verb = bench.rng.choice(("plan", "plan", "prune"))
    more = ("--ranking", "located/ranking.json") if verb == "prune" else ()
    return Case("rankings", verb, (*command(verb), *more))


def arrays(bench: Bench) -> Case:
    folder = bench.own("arrays")
    (numbers,) = folder.glob("ranking.*.safetensors")
    path = bench.rng.choice((numbers, numbers, folder / "ranking.json"))
    bench.spoil(path)
    if path.suffix == ".safetensors" and bench.rng.random() < 0.7 and path.is_file():  # else its digest finds it all
        import hashlib

        told = json.loads((folder / "ranking.json").read_text())
        told["arrays"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest() if path.stat().st_size < 2**20 else ""
        told["seal"] = None
        replace(folder / "ranking.json", dumped(told))
    return Case("rankings in safetensors", "plan", ("plan", "arrays/ranking.json", "--out", "out.json"))


def patch(bench: Bench) -> Case:
    """A patch, or the base that it is joined to."""
    rng = bench.rng
    if rng.random() < 0.35:
        config = bench.own("base") / "config.json"
        replace(config, dumped(bench.mutator.tree(json.loads(config.read_text()), times=1)))
    else:
        folder = bench.own("patch")
        bench.spoil(folder / rng.choice(("patch.json", "patch.json", "patch.safetensors")))
    verb = rng.choice(("export", "export", "bench", "tune"))
    return Case("patches", verb, command(verb, "patch"))


def weights(bench: Bench) -> Case:
    """The tensors of a model."""
    name = bench.rng.choice(("base", "base", "mamba", "hybrid"))
    bench.spoil(bench.own(name) / "model.safetensors")
    verb = bench.rng.choice(("tune", "export")) if name == "hybrid" else bench.rng.choice(("locate", "locate", "splice"))
    return Case("weights", verb, command(verb, name))


def configuration(bench: Bench) -> Case:
    name = bench.rng.choice(("base", "base", "mamba", "hybrid", "donor"))
    file = bench.rng.choice(("config.json",) * 4 + ("generation_config.json",))
    bench.spoil(bench.own(name) / file)
    verb = bench.rng.choice(("tune", "export")) if name == "hybrid" else "locate"
    return Case("configurations", verb, command(verb, name))


def tokenizer(bench: Bench) -> Case:
    bench.spoil(bench.own("base") / bench.rng.choice(("tokenizer.json", "tokenizer_config.json")))
    verb = bench.rng.choice(("locate", "bench", "run"))
    return Case("tokenizers", verb, command(verb))


def text(bench: Bench) -> Case:
    name = bench.rng.choice(("text.txt", "text.jsonl", "text.json", "text.csv", "text.parquet", "held-out.txt"))
    bench.spoil_rows(name) if name.endswith("l") and bench.rng.random() < 0.5 else bench.spoil(bench.own(name))
    if name == "held-out.txt":
        return Case("texts", "bench", (*command("bench"), "--set", f"data.held_out_text={name}"))
    streamed = ",streaming: true" if bench.rng.random() < 0.3 and name != "text.txt" else ""
    return Case("texts", "tune", (*command("tune"), "--set", f"data.train_text=[{{source: {name}{streamed}}}]"))


def facts(bench: Bench) -> Case:
    bench.spoil_rows("facts.jsonl") if bench.rng.random() < 0.75 else bench.spoil(bench.own("facts.jsonl"))
    verb = bench.rng.choice(("bench", "tune", "prune"))
    more = ("--set", "tune.early_stopping={examples: 2, windows: 1, eval_steps: 1}") if verb == "tune" else ()
    return Case("facts", verb, (*command(verb), *more))


def report(bench: Bench) -> Case:
    bench.spoil(bench.own("benched") / "report.json")
    return Case("reports", "export", ("export", "hybrid", "--out", "out", *TENSORS, "--report", "benched/report.json"))


def requirement(bench: Bench) -> Case:
    """What --require and other options take."""
    rng, mutator = bench.rng, bench.mutator
    good = rng.choice(("kv.4 >= base + 0.3", "hybrid.kv.4 >= 0.9", "perplexity <= base * 1.02", "knowledge > 1e-3"))
    given = rng.choice((mutator.text(good), mutator.near(good), f"kv.4 >= {json_text(mutator.value())}",
                        f"{json_text(mutator.value())} >= 1"))  # fmt: skip
    given = str(given)[:20_000].replace("\x00", "").encode("utf-8", "replace").decode()
    options = (("--require", given), ("--out", given), ("--recipe", given))
    return Case("metrics", "bench", (*command("bench"), *rng.choice((options[0], *options))), (0, 1, 2))


def finished(bench: Bench) -> Case:
    """A folder of an earlier run that is resumed, or replaced."""
    rng = bench.rng
    verb, folder = rng.choice((("locate", "located"), ("bench", "benched"), ("tune", "tuned")))
    place = bench.own(folder)
    places = [place, bench.own("tuned-tuning")] if verb == "tune" else [place]
    files = [path for root in places for path in root.rglob("*") if path.is_file() and path.suffix not in (".png", ".html")]
    for path in rng.sample(sorted(files), min(len(files), rng.choice((1, 1, 3)))):
        bench.spoil(path) if path.stat().st_size else bench.mutator.file(path)
    way = "--overwrite" if rng.random() < 0.25 else "--resume"
    return Case("finished runs", verb, (*command(verb, out=folder), way))


def record(bench: Bench) -> Case:
    """What a hybrid's folder says of itself."""
    folder = bench.own("hybrid")
    files = [path for path in folder.iterdir() if path.suffix == ".json" and path.name not in ("tokenizer.json", "config.json")]
    bench.spoil(bench.rng.choice(sorted(files)))
    verb = bench.rng.choice(("export", "tune", "bench", "publish"))
    return Case("records of hybrids", verb, command(verb, "hybrid"))


def command(verb: str, model: str | None = None, out: str = "out") -> tuple[str, ...]:
    """A command of a verb that works on the good inputs, in seconds."""
    base, hybrid = model or "base", model or "hybrid"
    return {
        "locate": ("locate", base, "--out", out, *RECIPE),
        "plan": ("plan", "located/ranking.json", "--out", "out.json"),
        "splice": ("splice", base, "plan.json", "--out", out, *TENSORS),
        "tune": ("tune", hybrid, "--out", out, *TENSORS, *RECIPE),
        "bench": ("bench", "base", hybrid, "--out", out, *RECIPE),
        "export": ("export", hybrid, "--out", out, "--format", "patch" if hybrid == "hybrid" else "hf", *TENSORS),
        "prune": ("prune", base, "--out", out, *RECIPE),
        "run": ("run", "small.yaml", "--out", out, *TENSORS),
        "pretrain": ("pretrain", "small.yaml", "--out", out),
        "publish": ("publish", hybrid, "me/model", "--dry-run"),
    }[verb]


def _sizes_left_out(path: Path, verb: str) -> tuple[str, ...]:
    """Settings for the sizes that a recipe has lost: their defaults would take minutes."""
    if not path.is_file() or path.stat().st_size > 2**16:
        return ()
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except Exception:  # whatever YAML chokes on
        return ()
    if not isinstance(tree, dict):
        return ()
    lost = []
    for section in ("locate", "tune", "bench"):
        has = tree.get(section, {})
        if isinstance(has, dict) and verb in ("run", section):
            lost += [f"{section}.{name}={json.dumps(value)}" for name, value in SMALL[section].items() if name not in has]
    return tuple(part for setting in lost for part in ("--set", setting))


def yaml_text(value: Any) -> str:
    try:
        return yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).removesuffix("\n...\n").strip()
    except (RecursionError, ValueError, yaml.YAMLError):
        return "[" * 5000


def json_text(value: Any) -> str:
    return dumped(value).decode().replace("\n", "")


def _default(key: str) -> Any:
    tree: Any = SMALL
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


# How many of a hundred inputs are of a kind.
KINDS: dict[Callable[[Bench], Case], int] = {
    setting: 20, recipe: 14, plan: 10, ranking: 9, arrays: 4, patch: 7, weights: 6, configuration: 7, tokenizer: 4, text: 5,
    facts: 5, report: 2, requirement: 2, finished: 3, record: 2,
}  # fmt: skip
