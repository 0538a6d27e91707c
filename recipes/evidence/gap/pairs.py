"""Does it matter which heads of the layer become attention, or is it enough that some do?

    python recipes/evidence/gap/pairs.py --seeds 1 2 3    measure what pairs.jsonl does not hold yet
    python recipes/evidence/gap/pairs.py --page           pairs.md and pairs.png, from pairs.jsonl and gap.jsonl

Every pair of heads of the located layer, and all its heads, on the bases of gap.py, whose trainings have to be in runs/gap:
tuned on the rows, for the steps and at the rate of the edit, once with null keys and once without, so that attention acts at
every token. A null key is set by how a head's scores lie on text, so one of a head that retrieves nothing may never open.
"""

import time
from itertools import combinations
from typing import Any

import gap
import numpy as np
from prose_page import table

import surgery
from surgery.evaluation.statistics import difference
from surgery.records.site import Site
from surgery.runtime.files import write_text
from surgery.runtime.progress import say
from surgery.splicing.splice import adopt

RECORD = gap.HERE / "pairs.jsonl"
ARMS = {True: "with null keys", False: "without null keys"}
ASKED = ("kv.64", "kv_unseen.64", "text")
Row = dict[str, Any]


def measure(seed: gap.Seed, heads: tuple[int, ...], null: bool) -> Row:
    """The row of one set of heads."""
    started = time.process_time()
    (located,) = seed.plan(2).sites
    options = {} if null else {"share": None}
    model = surgery.splice(seed.base, seed.plan_at([Site(located.layer, heads)], **options))
    steps, _ = seed.steps(gap.EQUAL)
    tuning = seed.tuning.model_copy(update={"steps": steps, "warmup_steps": min(10, steps // 2)})
    teacher = seed.training("base").model
    surgery.tune(model, seed.tokenizer, tuning, gap.DATA, seed=seed.seed, name=f"{heads}", teacher=teacher)
    results = {each.name: gap.pack(each.ask(adopt(model)), each.metric) for each in seed.asked() if each.name in ASKED}
    row = {"seed": seed.seed, "heads": heads, "null": null, "located": located.heads, "steps": steps, "results": results}
    return row | {"cpu_seconds": round(time.process_time() - started, 1)}


def measure_all(seeds: list[int]) -> None:
    """Measure set by set: of all seeds with null keys first."""
    every = tuple(range(gap.BASE["architecture"]["num_heads"]))
    done = {(row["seed"], tuple(row["heads"]), row["null"]) for row in gap.read_rows(RECORD)}
    wanted = [(seed, heads, null) for null in ARMS for seed in seeds for heads in (*combinations(every, 2), every)]
    todo = [cell for cell in wanted if cell not in done]
    say(f"{len(todo)} models of about 7 seconds of one core")
    current = gap.Seed(seeds[0])
    for number, (seed, heads, null) in enumerate(todo):
        current = current if current.seed == seed else gap.Seed(seed)
        gap.add_row(RECORD, row := measure(current, heads, null))
        say(f"{number + 1} of {len(todo)}: seed {seed}, {heads}, {ARMS[null]}: {row['results']['kv.64']['mean']:.3f}")


# What the page says

PAGE = """# Which heads of the layer?

{verdict}

Every pair of heads of the located layer, and all eight, on the {seeds} bases of [the gap](README.md): tuned on the rows, for
the steps and at the rate of the edit, once with null keys, once without. {limit} questions of a kind; means over seeds, of
{models:,} models in all. “As the base”: the share of models that change at most 2% of the answers with 64 pairs. In the second
table "rank" is that of the located pair among the {count} pairs of its layer, 1 for the best.

{table}

{alone}

![64 pairs, every pair of heads a point](pairs.png)

{minutes:.0f} minutes of processor time. `pairs.py` measures, and writes this page; `pairs.jsonl` is the record.
"""
GROUPS = {
    "the located pair": lambda common, heads: common == 2 and heads == 2,
    "pairs with one of its heads": lambda common, heads: common == 1 and heads == 2,
    "pairs with none": lambda common, heads: common == 0 and heads == 2,
    "any pair": lambda common, heads: heads == 2,
    "all eight heads": lambda common, heads: heads > 2,
}
FEW = 0.02  # of the answers that a model changes


def score(row: Row, asked: str = "kv.64") -> float:
    return row["results"][asked]["mean"]


def is_in(row: Row, group: str) -> bool:
    return GROUPS[group](len({*row["heads"]} & {*row["located"]}), len(row["heads"]))


def by_seed(rows: list[Row], group: str, null: bool, asked: str = "kv.64") -> np.ndarray:
    """The mean score of a group, a number a seed."""
    own = [row for row in rows if is_in(row, group) and row["null"] == null]
    return np.array([np.mean([score(row, asked) for row in own if row["seed"] == seed]) for seed in all_seeds(rows)])


def all_seeds(rows: list[Row]) -> list[int]:
    return sorted({row["seed"] for row in rows})


def rank(rows: list[Row], seed: int, null: bool) -> int:
    """Of the located pair among all pairs of its layer: how many score higher, and one."""
    own = [row for row in rows if (row["seed"], row["null"]) == (seed, null) and is_in(row, "any pair")]
    (located,) = [score(row) for row in own if is_in(row, "the located pair")]
    return 1 + sum(score(row) > located for row in own)


def write_page(rows: list[Row], gap_rows: list[Row]) -> str:
    """The page, from pairs.jsonl and gap.jsonl."""
    seeds = all_seeds(rows)
    base = {seed: {a: gap.values(gap_rows, ("base", 0.0), a)[seed] for a in ASKED} for seed in seeds}
    lines = [["", *(f"{words}: {what}" for words in ARMS.values() for what in ("64 pairs", "new keys", "as the base"))]]
    lines[0] += [f"loss on text, {words}" for words in ARMS.values()]
    scores = [f"{np.mean([base[seed][asked].mean() for seed in seeds]):.3f}" for asked in ASKED]
    lines.append(["the base", *scores[:2], "", *scores[:2], "", scores[2], scores[2]])
    for group in GROUPS:
        cells = []
        for null in ARMS:
            own = [row for row in rows if is_in(row, group) and row["null"] == null]
            changed = [np.mean(gap.unpack(row["results"]["kv.64"]) != base[row["seed"]]["kv.64"]) for row in own]
            cells += [f"{by_seed(rows, group, null, asked).mean():.3f}" for asked in ASKED[:2]]
            cells.append(f"{np.mean(np.array(changed) <= FEW):.2f}")
        lines.append([group, *cells, *(f"{by_seed(rows, group, null, 'text').mean():.3f}" for null in ARMS)])
    head = ["seed", "base"]
    for words in ARMS.values():
        head += [f"{words}: located", "rank", "one of its heads", "none", "the best", "all eight"]
    alone = [head]
    for place, seed in enumerate(seeds):
        line = [str(seed), f"{base[seed]['kv.64'].mean():.3f}"]
        for null in ARMS:
            groups = [by_seed(rows, group, null)[place] for group in GROUPS]
            best = max(score(row) for row in rows if (row["seed"], row["null"]) == (seed, null) and is_in(row, "any pair"))
            line += [
                f"{groups[0]:.3f}",
                str(rank(rows, seed, null)),
                *(f"{each:.3f}" for each in (*groups[1:3], best, groups[4])),
            ]
        alone.append(line)
    said = []
    for null, words in ARMS.items():
        located, others = (by_seed(rows, group, null) for group in ("the located pair", "pairs with none"))
        gain = difference(others, located)
        ranks = [rank(rows, seed, null) for seed in seeds]
        any_, all_ = (by_seed(rows, group, null).mean() for group in ("any pair", "all eight heads"))
        said.append(
            f"{words.capitalize()} the located pair scores {located.mean():.3f}, pairs of other heads {others.mean():.3f} on "
            f"average\n(difference over {len(seeds)} bases {gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]), any pair "
            f"{any_:.3f}, all eight heads {all_:.3f}. No pair scores higher on {ranks.count(1)} of {len(seeds)}\n"
            f"bases; on the others its rank among all pairs is {', '.join(str(each) for each in ranks if each > 1)}."
        )
    return PAGE.format(
        verdict="\n".join(said),
        seeds=len(seeds),
        limit=gap.BENCH.limit,
        models=len(rows),
        count=len({tuple(row["heads"]) for row in rows if is_in(row, "any pair")}),
        table=table(lines),
        alone=table(alone),
        minutes=sum(row["cpu_seconds"] for row in rows) / 60,
    )


def draw(rows: list[Row], path: Any) -> None:
    """The score of every pair, seed by seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    colors = {"pairs with none": "#9ca3af", "pairs with one of its heads": "#56b4e9", "the located pair": "#d55e00"}
    for axes, (null, words) in zip(panels, ARMS.items(), strict=True):
        for shift, (group, color) in zip((-0.18, 0.0, 0.18), colors.items(), strict=True):
            own = [row for row in rows if is_in(row, group) and row["null"] == null]
            places = [all_seeds(rows).index(row["seed"]) + shift for row in own]
            size = 7 if group == "the located pair" else 4
            axes.plot(places, [score(row) for row in own], "o", color=color, alpha=0.7, markersize=size, label=group)
        axes.set(xlabel="base", title=words)
        axes.set_xticks(range(len(all_seeds(rows))), [str(seed) for seed in all_seeds(rows)])
    panels[0].set_ylabel("64 pairs")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, and write the page."""
    given = gap.parse_arguments(__doc__, "write pairs.md and pairs.png, from what is measured")
    if given.seeds:
        measure_all(given.seeds)
    if given.page:
        rows = gap.read_rows(RECORD)
        draw(rows, gap.HERE / "pairs.png")
        write_text(gap.HERE / "pairs.md", write_page(rows, gap.read_rows()))


if __name__ == "__main__":
    main()
