"""Is a rival of the edit beaten only because it learns more slowly, or at another rate?

    python recipes/evidence/gap/plateau.py --seeds 6 7 8    measure what plateau.jsonl does not hold yet
    python recipes/evidence/gap/plateau.py --page           plateau.md, from plateau.jsonl and gap.jsonl

The edit and its rivals on bases of gap.py, whose trainings have to be in runs/gap: each at a third of its learning rate, at the
rate itself and at three times it, until the loss on examples that are kept back is flat (tune.steps=auto, at most 2,000); then
for 2,000 steps at the best of the three. The best answers most of 400 other questions than those whose answers are shown. Every
row is on disk at once, and a tuning goes on from its last 50 steps.
"""

from typing import Any

import gap
import numpy as np

import surgery
from surgery.evaluation.costs import cache_bytes, read_context
from surgery.probes.scoring import answer
from surgery.runtime.files import write_text
from surgery.runtime.progress import say
from surgery.splicing.splice import adopt
from surgery.tuning.examples import Batches

RECORD = gap.HERE / "plateau.jsonl"
GROUPS = (("all weights",), ("same layer", "adapters", "2 heads"), ("whole layer", "initial state"))  # in this order
WORDS = gap.RIVALS | {"2 heads": "**two located heads**"}
FACTORS, MOST, CHOOSE = (1 / 3, 1.0, 3.0), 2000, 400  # of the learning rate; steps; questions by which the best is chosen
SECONDS = 0.15  # of one core a step, of which the budget is made that is said beforehand
Row = dict[str, Any]


def cells(rows: list[Row], seeds: list[int]) -> list[tuple[int, str, float, bool]]:
    """(seed, model, factor, until flat) that are missing. What takes all steps is known when its three rates are."""
    done = {(row["seed"], row["model"], row["factor"], row["auto"]) for row in rows}
    wanted = []
    for group in GROUPS:
        wanted += [(seed, name, factor, True) for name in group for seed in seeds for factor in FACTORS]
        for name, seed in ((name, seed) for name in group for seed in seeds):
            flat = [row for row in rows if (row["seed"], row["model"], row["auto"]) == (seed, name, True)]
            if len(flat) == len(FACTORS):
                wanted.append((seed, name, best(flat)["factor"], False))
    return [cell for cell in wanted if cell not in done]


def best(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: row["choose"])


def measure(seed: gap.Seed, name: str, factor: float, auto: bool) -> Row:
    """The row of a cell."""
    model, teacher, tuning, trained = seed.begin(name)
    rate = tuning.learning_rate * factor
    tuning = tuning.model_copy(update={"learning_rate": rate, "steps": "auto" if auto else MOST, "max_steps": MOST})
    folder = gap.WORK / f"{seed.seed}-plateau" / f"{name}, {rate:.1g}, {tuning.steps}"
    log = surgery.tune(model, seed.tokenizer, tuning, seed=seed.seed, folder=folder, name=name, teacher=teacher)
    losses = [record["examples"] for record in log.steps]
    choose = gap.make_probe("kv", seed.tokenizer, pairs=64).questions(CHOOSE, seed.seed + 20_000)
    batches = Batches(seed.tokenizer, tuning, gap.DATA, seed.seed)
    padding = seed.tokenizer.pad_token_id
    seen = sum(int((part.ids != padding).sum()) for step in range(len(log.steps)) for part in batches.step(step))
    return {
        **{"seed": seed.seed, "model": name, "factor": factor, "auto": auto, "rate": rate, "trained": trained},
        **{"steps": len(log.steps), "flat": log.flat, "tokens": seen, "of_pretraining": seen / seed.tokens},
        "choose": float(answer(adopt(model), seed.tokenizer, choose).correct.mean()),
        "losses": [round(float(np.mean(losses[i : i + 25])), 3) for i in range(0, len(losses), 25)],
        "cache_bytes": cache_bytes(read_context(adopt(model), 2048)),
        "results": {each.name: gap.pack(each.ask(adopt(model)), each.metric) for each in seed.asked()},
    }


def measure_all(seeds: list[int]) -> None:
    """Measure cell by cell; what is to be done is looked up after each, since the best rate is known only then."""
    rows, current = gap.read_rows(RECORD), gap.Seed(seeds[0])
    left = sum(map(len, GROUPS)) * len(seeds) - sum(not row["auto"] for row in rows)
    flat = sum(auto for *_, auto in cells(rows, seeds))
    most = (flat + left) * MOST * SECONDS / 60
    say(f"{flat} cells until flat, {left} of {MOST} steps: at most {most:.0f} minutes of one core")
    while todo := cells(rows, seeds):
        seed, name, factor, auto = todo[0]
        steps = "until flat" if auto else f"{MOST} steps"
        say(f"seed {seed}, {name}, rate times {factor:.2g}, {steps}; after it {len(todo) - 1} more are known")
        current = current if current.seed == seed else gap.Seed(seed)
        rows.append(measure(current, name, factor, auto))
        gap.add_row(RECORD, rows[-1])


PAGE = """# Rivals tuned for longer

{verdict}

{seeds} of [the gap](README.md), on whose bases the edit answers almost everything; others were not tuned for longer. Each
model is tuned at three learning rates
until the loss on examples that are kept back is flat (tune.steps=auto, at most {most:,} steps), then for {most:,} steps at the
best of them. Of each seed's tunings, the one that answers most of {choose} other questions counts. Their keys are
of both kinds: all tuning dictionaries draw on the same 64 words, which long tuning memorises.
{limit} questions of 64 pairs; means over these seeds, with the steps and their tokens as a share of all pretraining tokens.

{table}

{left}`plateau.py` measures, and writes this page; `plateau.jsonl` is the record.
"""


def mean_score(rows: list[Row], asked: str = "kv.64") -> float:
    return float(np.mean([row["results"][asked]["mean"] for row in rows]))


def by_seed(rows: list[Row], asked: str) -> str:
    return f"{mean_score(rows, asked):.3f}: {', '.join(f'{mean_score([row], asked):.3f}' for row in rows)}"


def scores(rows: list[Row]) -> str:
    return f"{mean_score(rows):.3f} with 64 pairs and {mean_score(rows, 'kv_unseen.64'):.3f} with new keys"


def write_cell(rows: list[Row], seeds: int) -> str:
    """The mean score with 64 pairs, the steps, their tokens in pretrainings, and of how many seeds where some are missing."""
    if not rows:
        return "not done"
    steps, tokens = (np.mean([row[key] for row in rows]) for key in ("steps", "of_pretraining"))
    some = f", {len(rows)} of {seeds} seeds" * (len(rows) < seeds)
    return f"{mean_score(rows):.3f} ({steps:,.0f} steps, {tokens:.0%}{some})"


def write_page(rows: list[Row], brief: list[Row]) -> str:
    """The page, from plateau.jsonl and gap.jsonl."""
    seeds, own = sorted({row["seed"] for row in rows}), dict[str, list[Row]]()
    for name in (name for group in GROUPS for name in group):
        own[name] = [row for row in rows if row["model"] == name]
    short = {name: [r for r in brief if r["seed"] in seeds and (r["model"], r["share"]) == (name, gap.EQUAL)] for name in own}
    rates = [f"until flat, {words}" for words in ("a third of its rate", "its rate", "three times its rate")]
    lines = [["64 pairs", f"{gap.EQUAL:.0%}", *rates, f"{MOST:,} steps, best rate", "the best tuning, by seed"]]
    lines[0] += ["the same, new keys", "loss on text"]
    lines.append(["---"] * len(lines[0]))
    whole = dict[str, list[Row]]()
    for name, found in ((name, found) for name, found in own.items() if found):
        groups = [[row for row in found if row["auto"] and row["factor"] == factor] for factor in FACTORS]
        counted = [best(each) for seed in seeds if (each := [row for row in found if row["seed"] == seed])]
        if {row["factor"] for row in found if row["auto"]} == set(FACTORS) and len(counted) == len(seeds):
            whole[name] = counted
        cells = [write_cell(group, len(seeds)) for group in (*groups, [row for row in found if not row["auto"]])]
        cells += [by_seed(counted, "kv.64"), by_seed(counted, "kv_unseen.64"), f"{mean_score(counted, 'text'):.3f}"]
        lines.append([WORDS[name], f"{mean_score(short[name]):.3f}", *cells])
    rivals = sorted(whole.keys() - {"2 heads"}, key=lambda name: -mean_score(whole[name]))
    closes = mean_score(whole[rivals[0]]) >= mean_score(short["2 heads"])
    return PAGE.format(
        verdict=f"The strongest rival is {WORDS[rivals[0]]}, which {'matches' if closes else 'trails'} the edit.\n"
        f"After its best tuning it scores {scores(whole[rivals[0]])}.\n"
        f"The edit, tuned on {gap.EQUAL:.0%} of the pretraining tokens, scores {scores(short['2 heads'])}.",
        left="".join(f"Not done: {WORDS[name]}.\n" for name in own if not own[name]),
        seeds=f"Seeds {', '.join(map(str, seeds))}",
        most=MOST,
        choose=CHOOSE,
        limit=gap.BENCH.limit,
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
    )


def main() -> None:
    """Measure, and write the page."""
    given = gap.parse_arguments(__doc__, "write plateau.md from plateau.jsonl and gap.jsonl")
    if given.seeds:
        measure_all(given.seeds)
    if given.page:
        write_text(gap.HERE / "plateau.md", write_page(gap.read_rows(RECORD), gap.read_rows()))


if __name__ == "__main__":
    main()
