"""How much of the gap between a base and a hybrid that was trained from scratch does a brief edit close?

    python recipes/evidence/gap/gap.py --seeds 1 2 3    measure what gap.jsonl does not hold yet
    python recipes/evidence/gap/gap.py --page           gap.png and README.md, from gap.jsonl

A seed is three trainings on the same tokens: a base, its twin with attention at the two located heads from the first step on,
and its twin with one whole attention layer in the place of that layer. The base is then edited, and so is what rivals the edit.
Every finished figure is a line of gap.jsonl at once, and trainings go on from runs/gap, so the command can be stopped at any
time. The share closed is (edited - base) / (twin - base).
"""

import argparse
import copy
import json
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binom

import surgery
from surgery.evaluation.costs import cache_bytes, read_context
from surgery.evaluation.statistics import share_closed
from surgery.evaluation.suites import Given, Measurement, measurements, twice
from surgery.models.digests import fingerprint
from surgery.planning.choose import make_plan
from surgery.probes import make_probe, training_options
from surgery.records.plan import Plan
from surgery.records.recipe import Examples, Lora
from surgery.records.record import provenance
from surgery.records.site import Site
from surgery.runtime.files import read_text, write_text
from surgery.runtime.progress import say
from surgery.splicing.splice import adopt
from surgery.tuning.controls import control_plan, longest_row, narrow, trainable_control
from surgery.tuning.examples import Batches
from surgery.tuning.loop import trained_parameters

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
RECORD, WORK = HERE / "gap.jsonl", ROOT / "runs" / "gap"
sys.path.insert(0, str(ROOT / "recipes" / "pretraining"))
import train  # noqa: E402

BASE = {  # the recipe of tiny-skills, cut; the curriculum goes by the step, so that all models see the same tokens
    "architecture": {"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16}
    | {"state_size": 16, "n_groups": 1, "chunk_size": 32, "tie_word_embeddings": True},
    **{"alone_steps": 500, "alone_layers": 0, "steps": 1000, "learning_rate": 6e-3},
    **{"curriculum": {"first": 2, "last": 64, "over": 1200}, "targets": 128, "queries": 32, "documents": 2, "choice": 0},
}
WIDTH = 32  # of queries and keys, in twins and in edits
PLAN, LOCATE = surgery.PlanOptions(gate=1.0, width=WIDTH), surgery.Locate(roles=0, options={"pairs": 32})
KINDS = ("kv", "text")  # that a step of tuning sees
SHARES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)  # of the pretraining tokens
EQUAL = 0.03  # at which rivals are compared
LEARNT = 0.5  # of 16 pairs, which a base that has learnt retrieval answers
TUNE = surgery.Tune(batch_size=8, examples=(Examples(options={"pairs": (16, 64)}),))
BENCH, DATA = surgery.Bench(pairs=(16, 64), limit=200, windows=32), surgery.Data(skills=("knowledge",))
QUESTIONS = {"kv.64": "64 pairs", "kv_unseen.64": "64 pairs, new keys", "knowledge": "facts", "text": "loss on text"}
TWINS = {"twin": "attention at the same two heads", "twin layer": "one whole attention layer"}
EDITS = {
    "1 head": "one located head",
    "4 heads": "four located heads",
    "no null key": "two located heads without null keys, so that attention acts everywhere",
    "with adapters": "two located heads, and adapters on all layers",
}
RIVALS = {
    "prompt twice": "the prompt read twice, untrained",
    "more training": "the base's pretraining goes on",
    "all weights": "all of the base's weights tuned",
    "same layer": "two other heads of the same layer",
    "adapters": "adapters on all layers, about as many parameters as the edit",
    "initial state": "the initial state of every layer tuned",
    "other layer": "two heads of the other layer",
    "whole layer": "one whole attention layer grafted",
    "window": "all heads of the layer over a window of as many bytes",
}


def list_cells() -> list[tuple[str, float]]:
    """(model, share of the pretraining tokens) of a seed, in the order in which they are measured."""
    cells = [("base", 0.0), ("twin", 0.0), *(("2 heads", share) for share in SHARES if share <= EQUAL), ("prompt twice", 0.0)]
    cells += [(name, EQUAL) for name in RIVALS if name != "prompt twice"]
    cells += [("twin layer", 0.0), *((name, EQUAL) for name in EDITS), ("2 heads", SHARES[-1])]
    return [*cells, ("twin, tuned alike", EQUAL), ("twin, more training", EQUAL)]


class Seed:
    """One seed: its base, and what is made of it."""

    def __init__(self, seed: int):
        self.seed, self.tokenizer = seed, train.build_tokenizer()
        self.locating, self.tuning, self.kinds = LOCATE, TUNE, KINDS

    @cache  # noqa: B019
    def training(self, name: str) -> Any:
        """The finished training of the base or of a twin."""
        recipe = BASE | {"seed": self.seed}
        if name != "base":
            attention = [str(site) if name == "twin" else f"L{site.layer}" for site in self.plan(2).sites]
            recipe |= {"attention": attention, "attention_head_dim": WIDTH}
        training = self.open_training(train.BaseRecipe.model_validate(recipe), name)
        training.restore()
        training.run()
        training.save()
        if name != "base" and training.at["digest"] != self.training("base").at["digest"]:
            raise RuntimeError(f"seed {self.seed}: the {name} has not seen the tokens that the base has")
        training.model.eval().requires_grad_(False)
        return training

    def open_training(self, recipe: Any, name: str) -> Any:
        """A training before its first step."""
        return train.Training(recipe, self.tokenizer, WORK / f"{self.seed}-{name}")

    @property
    def base(self) -> Any:
        """The base, of which nothing shares a parameter that learns."""
        return surgery.unsplice(self.training("base").model)

    def questions(self, seed: int) -> Any:
        name, given = self.locating.probe, self.locating.options
        return make_probe(name, self.tokenizer, **training_options(name, given)).questions(128, seed)

    @cache  # noqa: B019
    def ranking(self) -> Any:
        return surgery.locate(self.base, self.tokenizer, self.questions(self.seed), self.locating)

    @cache  # noqa: B019
    def plan(self, heads: int) -> Plan:
        """Attention at the leading heads of the one layer that leads."""
        units = self.ranking().heads
        return self.plan_at([each.site for each in units if each.site.layer == units[0].site.layer][:heads])

    def plan_at(self, sites: Any, questions: Any = (), **options: Any) -> Plan:
        """Attention at these heads. questions: for plan.keep_skills. options: others than those of PLAN."""
        starts = {name: each.start for each in self.ranking().heads for name in each.site.head_names}
        given = PLAN.model_copy(update=options)
        return make_plan(self.base, self.tokenizer, sites, starts, given, DATA, self.seed, questions=questions)

    @property
    def tokens(self) -> int:
        return sum(self.training("base").at["tokens"].values())

    @property
    def batches(self) -> Batches:
        return Batches(self.tokenizer, self.tuning, DATA, self.seed)

    @cache  # noqa: B019
    def steps(self, share: float) -> tuple[int, dict[str, int]]:
        """Steps of tuning that see this share of the pretraining tokens, and how many tokens they see, by kind."""
        batches, seen, step = self.batches, dict.fromkeys(self.kinds, 0), 0
        while sum(seen.values()) < share * self.tokens:
            for kind, part in zip(seen, batches.step(step), strict=True):
                seen[kind] += int((part.ids != self.tokenizer.pad_token_id).sum())
            step += 1
        return step, seen

    def make(self, name: str, share: float) -> tuple[Any, dict[str, Any]]:
        """(a model, what its row says beside what is measured)."""
        steps, seen = self.steps(share)
        note: dict[str, Any] = {"steps": steps, "tokens": seen, "trained": 0}
        if name == "base" or name in TWINS:
            training = self.training(name)
            at = {key: training.at[key] for key in ("tokens", "digest", "seconds")}
            return training.model, {**at, "steps": training.at["all"], "trained": training.model.num_parameters()}
        if name == "prompt twice":
            return self.base, note
        if name.endswith("more training"):
            return self.train_on("twin" if name.startswith("twin") else "base", share)
        model, teacher, tuning, note["trained"] = self.begin(name)
        if steps:
            tuning = tuning.model_copy(update={"steps": steps, "warmup_steps": min(10, steps // 2)})
            surgery.tune(model, self.tokenizer, tuning, DATA, seed=self.seed, name=name, teacher=teacher)
        return model, note

    def begin(self, name: str) -> tuple[Any, Any, surgery.Tune, int]:
        """What is tuned: (the model, its teacher, how, how many numbers learn)."""
        tuning, model, teacher = self.tuning, None, self.training("base").model
        if name.endswith(("head", "heads", "with adapters")):
            model = surgery.splice(self.base, self.plan(int(name[0]) if name[0].isdigit() else 2))
        elif name == "no null key":
            model = surgery.splice(self.base, self.plan_at(self.plan(2).sites, share=None))
        elif name in ("same layer", "other layer", "window"):
            control = {"same layer": "same_layer", "other layer": "random_site"}.get(name, name)
            model = surgery.splice(self.base, self.plan_at(control_plan(control, self.base, self.plan(2), self.seed).sites))
            if name == "window":
                narrow(model, surgery.splice(self.base, self.plan(2)), longest_row(self.batches))
        elif name == "whole layer":
            layer = Site(self.plan(2).sites[0].layer)
            model = surgery.splice(self.base, Plan(kind="layer", sites=(layer,), width=WIDTH, seed=self.seed))
        elif name in ("initial state", "adapters"):
            model = trainable_control(self.base, self.plan(2), name.replace(" ", "_"))
        else:  # everything learns, of copies
            teacher = self.training("twin" if name.startswith("twin") else "base").model
            model = copy.deepcopy(teacher).requires_grad_(True)
        trained = sum(p.numel() for p in trained_parameters(model).values())
        if name.endswith("adapters"):
            rank, numbers = self.adapters()
            trained += numbers
            tuning = tuning.model_copy(update={"lora": Lora(target_modules=("in_proj", "out_proj"), r=rank)})
        elif name == "all weights":
            tuning = tuning.model_copy(update={"learning_rate": tuning.learning_rate / 3})
        return model, teacher, tuning, trained

    def adapters(self) -> tuple[int, int]:
        """(the rank at which adapters on all layers have as many numbers as the edit, or a few more; how many these are)."""
        graft = surgery.splice(self.base, self.plan(2))
        linear = [m for n, m in graft.named_modules() if n.endswith(("mixer.in_proj", "mixer.out_proj"))]
        of_rank_1 = sum(m.in_features + m.out_features for m in linear)
        rank = -(-sum(p.numel() for p in trained_parameters(graft).values()) // of_rank_1)
        return rank, rank * of_rank_1

    def train_on(self, name: str, share: float) -> tuple[Any, dict[str, Any]]:
        """The pretraining of a model goes on at a tenth of its largest rate, for as many tokens as the edit sees."""
        done = self.training(name)
        more = self.open_training(done.recipe, f"{name}-more")
        more.model.load_state_dict(done.model.state_dict())
        more.optimizer.load_state_dict(torch.load(done.work / "state.pt", weights_only=True)["optimizer"])
        more.rng.setstate(done.rng.getstate())
        more.at = copy.deepcopy(done.at) | {"tokens": {}}
        while sum(more.at["tokens"].values()) < share * self.tokens:
            parts = more.parts()
            more.note_tokens(parts)
            more.step(more.losses(parts), 0.1, "all")
        steps = more.at["all"] - done.at["all"]
        return more.model.eval(), {"steps": steps, "tokens": more.at["tokens"], "trained": more.model.num_parameters()}

    @cache  # noqa: B019
    def asked(self) -> list[Measurement]:
        return measurements(Given(self.tokenizer, BENCH, DATA, self.seed))

    def measure(self, name: str, share: float) -> dict[str, Any]:
        """The row of a cell."""
        started = time.process_time()
        model, note = self.make(name, share)
        results = {}
        for each in self.asked():
            again = twice(each, Given(self.tokenizer, BENCH, DATA, self.seed)) if name == "prompt twice" else None
            results[each.name] = pack((again or each).ask(adopt(model)), each.metric)
        row = {"seed": self.seed, "model": name, "share": share, **note, "results": results}
        held, tokens = (self.make("2 heads", 0.0)[0], longest_row(self.batches)) if name == "window" else (model, 2048)
        row["cache_bytes"] = cache_bytes(read_context(adopt(held), tokens))
        if name == "base":
            row["sites"] = {str(n): [str(site) for site in self.plan(n).sites] for n in (1, 2, 4)}
            row["provenance"] = provenance(f"gap {self.seed}", fingerprint(self.base), self.seed).model_dump(mode="json")
        return {**row, "cpu_seconds": round(time.process_time() - started, 1)}


def pack(values: np.ndarray, metric: str) -> dict[str, Any]:
    """One value a question: decisions as the bits of a hexadecimal number, losses to a ten-thousandth."""
    if metric == "accuracy":
        return {"mean": float(values.mean()), "n": len(values), "right": np.packbits(values.astype(bool)).tobytes().hex()}
    return {"mean": float(values.mean()), "n": len(values), "losses": [round(value, 4) for value in values.tolist()]}


def unpack(result: dict[str, Any]) -> np.ndarray:
    """One value a question, (n,)."""
    if "losses" in result:
        return np.array(result["losses"])
    return np.unpackbits(np.frombuffer(bytes.fromhex(result["right"]), np.uint8))[: result["n"]].astype(float)


def read_rows(record: Path = RECORD) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_text(record).splitlines()] if record.exists() else []


def add_row(record: Path, row: dict[str, Any]) -> None:
    """Write one row more; rows that another process has written meanwhile stay."""
    write_text(record, (read_text(record) if record.exists() else "") + json.dumps(row) + "\n")


def measure_all(seeds: list[int], record: Path = RECORD, cells: Any = None, make: Any = Seed) -> None:
    """Measure the cells that the record does not hold, seed by seed, and say beforehand how long it takes."""
    rows = read_rows(record)
    bases = {row["seed"]: row["provenance"]["fingerprint"] for row in rows if "provenance" in row}
    done = {(row["seed"], row["model"], row["share"]) for row in rows}
    todo = [(seed, name, share) for seed in seeds for name, share in cells or list_cells() if (seed, name, share) not in done]
    spent = {(row["model"], row["share"]): row["cpu_seconds"] for row in rows}
    known = [spent[name, share] for _, name, share in todo if (name, share) in spent]
    say(f"{len(todo)} cells; {len(known)} of them took {sum(known) / 60:.0f} minutes of one core in another seed")
    current = make(seeds[0])
    for number, (seed, name, share) in enumerate(todo):
        current = current if current.seed == seed else make(seed)
        if bases.get(seed) and bases[seed] != fingerprint(current.base):  # of other code, or other instructions
            raise RuntimeError(f"seed {seed}: {record.name} was measured on another training of the base; remove its rows")
        say(f"cell {number + 1} of {len(todo)}: seed {seed}, {name}, {share:.1%} of the tokens")
        add_row(record, current.measure(name, share))


# What the page says

YARDSTICKS = {
    ("base", 0.0): "the base",
    ("more training", EQUAL): f"the base, {EQUAL:.0%} more of its pretraining",
    ("twin", 0.0): f"the twin: {TWINS['twin']}",
    ("twin layer", 0.0): f"the layer twin: {TWINS['twin layer']}",
    ("twin, more training", EQUAL): f"the twin, {EQUAL:.0%} more of its pretraining",
    ("twin, tuned alike", EQUAL): "the twin, its attention tuned as the edit is",
}
PAGE = """# How much of the gap does an edit close?

{verdict}. With 64 pairs it scores {theirs}, and the edit {ours}.
The edit is two located heads, tuned on {equal:.0%} of the pretraining tokens. The base scores {base}. Its twin, which had
attention at these heads from the first step, scores {twin}. The share of this gap that the edit closes: {closed} over all
seeds; of the median seed {middle}.

{seeds}; {cells} models are measured.
A base has {parameters:,} parameters and has seen {tokens:,.0f} tokens (means over seeds), {pairs:,.0f} in dictionaries.
Its twins have seen the same tokens in the same order: the script stops if the digests differ. The edit sees {seen:,.0f}
tokens more, {seen_pairs:,.0f} in dictionaries. {limit} questions of a kind, the same for all models of a seed.

Share closed: (edited - base) / (twin - base). Its 95% interval is Fieller's over seeds; with fewer than three seeds, each
seed has its own, over questions. It is wide where one seed differs from all others; the median's interval does not assume how
seeds are distributed. No share is printed where the interval of the gap itself reaches 0. A base has not learnt retrieval if
it answers less than {learnt:.0%} with 16 pairs: {failed}. It counts like the others. Of the twins with one whole attention
layer, {layers} answer at least {learnt:.0%} with 64 pairs.

![Share of the gap closed, against the tokens of the edit](gap.png)

{tables}

Rivals that are tuned see the rows that the edit sees, at its learning rate (all weights: at a third of it). More pretraining
sees as many tokens of its own kinds. A window takes the bytes of the edit's cache of the longest row of tuning. None has more
steps than the edit, so one that loses may only be slower: [plateau.md](plateau.md) gives rivals three learning rates and up to
2,000 steps. [pairs.md](pairs.md) takes every pair of heads of the layer. [reach.md](reach.md) asks longer prompts and other
questions. [sizes.md](sizes.md) has other widths, a Mamba-1, and a law. [prose.md](prose.md) does the same with novels. An
n-gram cache is no rival here: a question's last words stand in no record.{missing}

{minutes:.0f} minutes of processor time on {machine}; {packages}. `gap.py` measures; `gap.jsonl` is the record.
"""

NOTHING = """# How much of the gap does an edit close?

Not known yet: {done} of {all} models of a seed are measured. `gap.py --seeds {next} --page` goes on.
"""


def values(rows: list[dict[str, Any]], cell: tuple[str, float], asked: str) -> dict[int, np.ndarray]:
    """seed -> one value a question."""
    return {row["seed"]: unpack(row["results"][asked]) for row in rows if (row["model"], row["share"]) == cell}


def shares(rows: list[dict[str, Any]], cell: tuple[str, float], asked: str, twin: str) -> tuple[Any, dict[int, Any]]:
    """(the share of the gap to a twin that a model closes, over three or more seeds; the same seed by seed). None where no gap
    is shown."""
    base, model, full = (values(rows, each, asked) for each in (("base", 0.0), cell, (twin, 0.0)))
    seeds = sorted(base.keys() & model.keys() & full.keys())
    means = [[each[seed].mean() for seed in seeds] for each in (base, model, full)]
    return share_closed(*map(np.array, means)), {seed: share_closed(base[seed], model[seed], full[seed]) for seed in seeds}


def show(found: tuple[Any, dict[int, Any]]) -> str:
    """A share in a table: over all seeds, or, of fewer than three, seed by seed."""
    over, alone = found
    each = [over] if len(alone) > 2 else list(alone.values())
    words = ["no gap shown" if one is None else f"{one.mean:.2f} [{one.low:.2f}, {one.high:.2f}]" for one in each]
    return "; ".join(words) or "not measured"


def median(found: tuple[Any, dict[int, Any]]) -> str:
    """The median of the seeds' shares, and between which of these it is at 95% by the binomial distribution, from six on."""
    ordered = sorted(each.mean for each in found[1].values() if each)
    rank = int(binom.ppf(0.025, len(ordered), 0.5)) if ordered else 0
    words = f"{np.median(ordered):.2f}" if ordered else "no gap shown"
    return f"{words} [{ordered[rank - 1]:.2f}, {ordered[-rank]:.2f}]" if rank else words


def mean(rows: list[dict[str, Any]], cell: tuple[str, float], asked: str) -> str:
    found = [each.mean() for each in values(rows, cell, asked).values()]
    return f"{np.mean(found):.3f}" if found else "not measured"


def write_page(rows: list[dict[str, Any]]) -> str:
    """README.md, from the record: of the seeds whose cells are all measured; if there is none, of the one that has most. Where
    that has no edit, no twin or no rival, it says so and nothing else."""
    cells, main, base, twin = list_cells(), ("2 heads", EQUAL), ("base", 0.0), ("twin", 0.0)
    counts, known = Counter(row["seed"] for row in rows), {(row["model"], row["share"]) for row in rows}
    seeds = [seed for seed in sorted(counts) if counts[seed] == len(known)] or [seed for seed, _ in counts.most_common(1)]
    rows = [row for row in rows if row["seed"] in seeds]
    at = {(row["model"], row["share"]): row for row in rows}
    names = {main: "**two located heads**"} | {(name, EQUAL): words for name, words in EDITS.items()}
    rivals = {(name, 0.0 if name == "prompt twice" else EQUAL): words for name, words in RIVALS.items()}
    if not {main, twin} <= at.keys() or not rivals.keys() & at.keys():
        return NOTHING.format(done=len(rows), all=len(cells), next=seeds[0] if seeds else 1)
    best = max((cell for cell in rivals if cell in at), key=lambda cell: mean(rows, cell, "kv.64"))
    beaten = mean(rows, best, "kv.64") > mean(rows, main, "kv.64")
    tables = [["two located heads, tokens of tuning", *QUESTIONS.values(), "64 pairs, to the layer twin"]]
    for share in SHARES:
        found = [show(shares(rows, ("2 heads", share), asked, "twin")) for asked in QUESTIONS]
        found.append(show(shares(rows, ("2 heads", share), "kv.64", "twin layer")))
        tables.append([f"{share:.1%}" if share else "untrained", *found])
    columns = ["base, 16 pairs", "base, 64 pairs", "edit, 64 pairs", "twin, 64 pairs"]
    tables += [[], ["seed", "heads", *columns, "share closed, over questions"]]
    for seed in seeds:
        own = [row for row in rows if row["seed"] == seed]
        figures = [mean(own, *each) for each in ((base, "kv.16"), (base, "kv.64"), (main, "kv.64"), (twin, "kv.64"))]
        heads = next(", ".join(row["sites"]["2"]) for row in own if row["model"] == "base")
        tables.append([str(seed), heads, *figures, show(shares(own, main, "kv.64", "twin"))])
    failed = [seed for seed in seeds if values(rows, base, "kv.16")[seed].mean() < LEARNT]
    head = ["parameters trained", "cache, 2,048 tokens", "64 pairs", "share closed", "median seed", "loss on text"]
    tables += [[], [f"{EQUAL:.0%} of the tokens", *head]]
    for cell, words in (names | rivals).items():
        if cell in at:
            cost = [f"{at[cell]['trained']:,}", f"{at[cell]['cache_bytes'] / 1024:.0f} KiB"]
            closed = shares(rows, cell, "kv.64", "twin")
            tables.append([words, *cost, mean(rows, cell, "kv.64"), show(closed), median(closed), mean(rows, cell, "text")])
    tables += [[], ["yardsticks", *QUESTIONS.values()]]
    tables += [[words, *(mean(rows, cell, asked) for asked in QUESTIONS)] for cell, words in YARDSTICKS.items()]
    lines = []
    for line, before in zip(tables, [[], *tables[:-1]], strict=True):
        lines.append(f"| {' | '.join(line)} |" if line else "")
        if line and not before:
            lines.append("|---" * len(line) + "|")
    seen = {cell: [row["tokens"] for row in rows if (row["model"], row["share"]) == cell] for cell in (base, main)}
    tokens = {cell: np.mean([[sum(each.values()), each["kv"]] for each in own], axis=0) for cell, own in seen.items()}
    return PAGE.format(
        verdict=f"{'A rival scores higher than the edit:' if beaten else 'The strongest rival is'} {rivals[best]}",
        theirs=mean(rows, best, "kv.64"),
        ours=mean(rows, main, "kv.64"),
        equal=EQUAL,
        base=mean(rows, base, "kv.64"),
        twin=mean(rows, twin, "kv.64"),
        closed=show(shares(rows, main, "kv.64", "twin")),
        middle=median(shares(rows, main, "kv.64", "twin")),
        seeds=f"{len(seeds)} seed{'s' * (len(seeds) > 1)} ({', '.join(map(str, seeds))})",
        cells=f"{len(rows)} of {len(cells) * len(seeds)}",
        parameters=at[base]["trained"],
        tokens=tokens[base][0],
        pairs=tokens[base][1],
        seen=tokens[main][0],
        seen_pairs=tokens[main][1],
        limit=BENCH.limit,
        learnt=LEARNT,
        missing="".join(f" Not measured yet: {words}." for cell, words in rivals.items() if cell not in at),
        layers=f"{sum(v.mean() >= LEARNT for v in values(rows, ('twin layer', 0.0), 'kv.64').values())} of {len(seeds)}",
        failed=f"seed {', '.join(map(str, failed))}" if failed else "none",
        tables="\n".join(lines),
        minutes=sum(row["cpu_seconds"] for row in rows) / 60,
        packages=", ".join(f"{name} {version}" for name, version in at[base]["provenance"]["packages"].items()),
        machine=at[base]["provenance"]["machine"],
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Share closed with 64 pairs against tokens, every seed a point."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    places = [max(share, SHARES[1] / 3) for share in SHARES]
    found = [shares(rows, ("2 heads", share), "kv.64", "twin")[1] for share in SHARES]
    labels: dict[float, list[str]] = {}  # seeds whose lines end at about the same height share one
    for seed in sorted(found[0]):
        line = [each[seed].mean if each.get(seed) else np.nan for each in found]
        axes.plot(places, line, "o-", color="#0072b2", alpha=0.4, markersize=5, linewidth=0.8)
        height = next((other for other in labels if abs(other - line[-1]) < 0.04), line[-1])
        labels.setdefault(height, []).append(str(seed))
    for height, ends in labels.items():
        text = f"seed{'s' * (len(ends) > 1)} {', '.join(ends)}"
        axes.annotate(text, (places[-1], height), (6, -3), textcoords="offset points", fontsize=8, color="#6b7280")
    means = [np.nanmean([each.mean for each in at.values() if each]) for at in found]
    axes.plot(places, means, color="#0072b2", linewidth=2.2, label="mean of the seeds' shares")
    axes.axhline(1, color="#6b7280", linestyle="--", linewidth=1)
    axes.set(xscale="log", xlabel="tokens of tuning, as a share of the pretraining tokens", ylabel="share of the gap closed")
    axes.set(xlim=(places[0] / 1.5, places[-1] * 3.5), ylim=(min(0, axes.get_ylim()[0]), max(1.1, axes.get_ylim()[1])))
    axes.set_xticks(places, ["untrained", *(f"{share:.1%}" for share in SHARES[1:])])
    axes.set_title("64 pairs, two located heads, against the twin with attention there from the start", fontsize=10)
    axes.legend(frameon=False, loc=(0.45, 0.12))
    figure.savefig(path, dpi=120)


def parse_arguments(words: str, page: str, **others: Any) -> Any:
    """The command line of a study, which computes with one thread. words: its docstring. page: what --page does."""
    parser = argparse.ArgumentParser(description=words.splitlines()[0])
    for name, options in others.items():
        parser.add_argument(name, **options)
    parser.add_argument("--seeds", type=int, nargs="*", default=[], help="seeds of which what is missing is measured")
    parser.add_argument("--page", action="store_true", help=page)
    torch.set_num_threads(1)
    return parser.parse_args()


def main() -> None:
    """Measure, and write the page."""
    given = parse_arguments(__doc__, "write gap.png and README.md from gap.jsonl")
    if given.seeds:
        measure_all(given.seeds)
    if given.page:
        draw(read_rows(), HERE / "gap.png")
        write_text(HERE / "README.md", write_page(read_rows()))


if __name__ == "__main__":
    main()
