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

import surgery
from surgery.records.site import Site
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
