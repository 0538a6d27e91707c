"""Does the share closed follow a law over sizes, seeds and tokens, and is it the same in a Mamba-1?

    python recipes/evidence/gap/sizes.py --shapes 48 --seeds 1 2 3    measure what sizes.jsonl does not hold yet
    python recipes/evidence/gap/sizes.py --page                       sizes.md and sizes.png, from sizes.jsonl and gap.jsonl

The base, its twin, the edit at four numbers of tokens, and two rivals, as in gap.py, whose bases are 64 wide. A shape has its
trainings in runs/gap/SHAPE. The law is fitted to Mamba-2 bases of all widths but the largest, and tested on the largest.
"""

from typing import Any

import gap
import numpy as np

from surgery.runtime.files import write_text
from surgery.runtime.progress import say

RECORD = gap.HERE / "sizes.jsonl"
BASE, WORK = gap.BASE, gap.WORK
SHAPES: dict[str, dict[str, Any]] = {
    "48": {"hidden_size": 48, "head_dim": 12},
    "64": {},
    "96": {"hidden_size": 96, "head_dim": 24},
    "128": {"hidden_size": 128, "head_dim": 32},
    "mamba1": {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "tie_word_embeddings": True},
}
TESTED = "128"
EDITS = (0.0, 0.003, 0.01, gap.EQUAL)
CELLS = [("base", 0.0), ("twin", 0.0), *(("2 heads", share) for share in EDITS)]
CELLS += [("same layer", gap.EQUAL), ("all weights", gap.EQUAL)]
Row = dict[str, Any]


def take_shape(shape: str) -> None:
    """What gap.py trains from now on, and where it keeps it."""
    own = SHAPES[shape]
    architecture = own if "model_type" in own else BASE["architecture"] | own
    gap.BASE, gap.WORK = BASE | {"architecture": architecture}, WORK / shape


def read_rows() -> list[Row]:
    """Of all shapes; those of 64 are gap.py's."""
    wide = [{**row, "shape": "64"} for row in gap.read_rows() if (row["model"], row["share"]) in CELLS]
    return wide + gap.read_rows(RECORD)


def measure_all(shapes: list[str], seeds: list[int]) -> None:
    """Measure cell by cell what the record does not hold."""
    rows = gap.read_rows(RECORD)
    done = {(row["shape"], row["seed"], row["model"], row["share"]) for row in rows}
    todo = [(shape, seed, *cell) for seed in seeds for shape in shapes for cell in CELLS]
    todo = [cell for cell in todo if cell not in done]
    spent = {(row["shape"], row["model"], row["share"]): row["cpu_seconds"] for row in read_rows()}
    known = [spent[shape, name, share] for shape, _, name, share in todo if (shape, name, share) in spent]
    say(f"{len(todo)} cells; {len(known)} of them took {sum(known) / 60:.0f} minutes of one core in other seeds")
    current = None
    for number, (shape, seed, name, share) in enumerate(todo):
        if current is None or current[0] != (shape, seed):
            take_shape(shape)
            current = ((shape, seed), gap.Seed(seed))
        say(f"cell {number + 1} of {len(todo)}: {shape}, seed {seed}, {name}, {share:.1%} of the tokens")
        gap.add_row(RECORD, {"shape": shape, **current[1].measure(name, share)})


# The law


def points(rows: list[Row], shapes: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(features, shares closed with 64 pairs, numbers of the bases) of every edit that was tuned. The features: 1, what the
    base answers with 16 pairs, and the logarithm of the share of tokens."""
    features, found, bases = [], [], []
    for number, (shape, seed) in enumerate(sorted({(row["shape"], row["seed"]) for row in rows if row["shape"] in shapes})):
        own = {(row["model"], row["share"]): row for row in rows if (row["shape"], row["seed"]) == (shape, seed)}
        if not {("base", 0.0), ("twin", 0.0)} <= own.keys():
            continue
        base, twin = (own[name, 0.0]["results"]["kv.64"]["mean"] for name in ("base", "twin"))
        for share in EDITS[1:]:
            if ("2 heads", share) in own and twin > base:
                learnt = own["base", 0.0]["results"]["kv.16"]["mean"]
                features.append([1.0, learnt, np.log10(share / gap.EQUAL)])
                found.append((own["2 heads", share]["results"]["kv.64"]["mean"] - base) / (twin - base))
                bases.append(number)
    return np.array(features), np.array(found), np.array(bases)


def fit(features: np.ndarray, found: np.ndarray) -> np.ndarray:
    """The coefficients (3,) by least squares."""
    return np.linalg.lstsq(features, found, rcond=None)[0]


def predict(features: np.ndarray, law: np.ndarray) -> np.ndarray:
    return (features @ law).clip(0, 1)


def intervals(features: np.ndarray, found: np.ndarray, bases: np.ndarray, draws: int = 2000) -> np.ndarray:
    """95% intervals (2, 3) of the coefficients, by drawing whole bases with replacement."""
    rng, numbers = np.random.default_rng(0), np.unique(bases)
    laws = []
    for _ in range(draws):
        chosen = np.concatenate([np.flatnonzero(bases == one) for one in rng.choice(numbers, len(numbers))])
        laws.append(fit(features[chosen], found[chosen]))
    return np.quantile(laws, [0.025, 0.975], axis=0)


# What the page says

PAGE = """# Sizes, a Mamba-1, and a law

{verdict}

Mamba-2 bases of four widths (those of 64 are those of [the gap](README.md)) and a Mamba-1, all of two layers; {limit}
questions of a kind. The edit is two located heads, tuned on {equal:.0%} of the pretraining tokens; of the Mamba-1, two blocks
of 16 channels. Share closed: (edited - base) / (twin - base), of means over seeds with Fieller's interval, and the median
seed's; with fewer than three seeds, each seed's own interval, over questions. Twins that learnt less than their base, and so
are no yardstick for it: {failed}.

{table}

**The law**: share closed with 64 pairs = {law}, between 0 and 1,
where base16 is what the base answers with 16 pairs. Fitted by least squares to {edits} edits of {bases} Mamba-2 bases of the
widths {widths}; intervals by drawing bases with replacement. On {tests} edits of {others} bases that are {tested} wide,
which it has not seen, it is off by {error:.2f} on average; the mean of the fitted shares, for each number of tokens, by
{naive:.2f}; that of the bases that have learnt retrieval, or have not, as the base in question, by
{levels:.2f}. On {few} edits of the Mamba-1: {mamba1}. Heads and trained length are not in the law; they were not varied here.

**Which heads** matters less on wider bases. The edit and two other heads of its layer, 64 pairs, by seed: {rivals}.

![Share closed against what the base answers with 16 pairs, and the law](sizes.png)

{minutes:.0f} minutes of processor time, without the bases of gap.jsonl. `sizes.py` measures, and writes this page;
`sizes.jsonl` is the record.
"""
COLUMNS = {  # but for the first two, what models score with 64 pairs
    "base, 16 pairs": (("base", 0.0), "kv.16"),
    "base": (("base", 0.0), "kv.64"),
    "edit, untrained": (("2 heads", 0.0), "kv.64"),
    "edit": (("2 heads", gap.EQUAL), "kv.64"),
    "edit, new keys": (("2 heads", gap.EQUAL), "kv_unseen.64"),
    "two other heads of the layer": (("same layer", gap.EQUAL), "kv.64"),
    "all weights": (("all weights", gap.EQUAL), "kv.64"),
    "twin": (("twin", 0.0), "kv.64"),
}


def of_shape(rows: list[Row], shape: str) -> list[Row]:
    """The rows of seeds of which all cells are measured."""
    own = [row for row in rows if row["shape"] == shape]
    seeds = [row["seed"] for row in own]
    return [row for row in own if seeds.count(row["seed"]) == len(CELLS)]


def errors(rows: list[Row], shape: str, law: np.ndarray, fitted: tuple[np.ndarray, np.ndarray]) -> tuple[list[float], int]:
    """(mean errors on a shape, how many edits these are). Of the law; of the mean of the fitted shares at each number of
    tokens; and of the same mean over those bases alone that have learnt retrieval, or have not, as this one."""
    features, found, _ = points(rows, [shape])
    tokens, shares, learnt = fitted[0][:, 2], fitted[1], fitted[0][:, 1] >= gap.LEARNT
    alike = [np.isclose(tokens, each) for each in features[:, 2]]
    levels = [same & (learnt == (base >= gap.LEARNT)) for same, base in zip(alike, features[:, 1], strict=True)]
    guesses = [predict(features, law), *(np.array([shares[chosen].mean() for chosen in each]) for each in (alike, levels))]
    return [float(np.abs(guess - found).mean()) for guess in guesses], len(found)


def rivals(rows: list[Row]) -> str:
    """What the edit and its rival in the same layer score, seed by seed."""
    said = []
    for shape in (name for name in SHAPES if name != "64" and of_shape(rows, name)):
        edit, other = (gap.values(of_shape(rows, shape), COLUMNS[name][0], "kv.64") for name in list(COLUMNS)[3:6:2])
        said.append(f"{shape}: {', '.join(f'{edit[seed].mean():.3f} and {other[seed].mean():.3f}' for seed in sorted(edit))}")
    return "; ".join(said)


def write_page(rows: list[Row]) -> str:
    """The page, from the record."""
    shapes = [shape for shape in SHAPES if of_shape(rows, shape)]
    rows = [row for shape in shapes for row in of_shape(rows, shape)]
    head = ["shape", "parameters", "seeds", *COLUMNS, "share closed", "median seed"]
    lines, failed = [head, ["---"] * len(head)], []
    for shape in shapes:
        own = of_shape(rows, shape)
        numbers = next(row["trained"] for row in own if row["model"] == "base")
        base, twin = (gap.values(own, (name, 0.0), "kv.64") for name in ("base", "twin"))
        worse = [seed for seed in base if twin[seed].mean() <= base[seed].mean()]
        failed += [f"{shape}, seed {seed} ({twin[seed].mean():.3f}, its base {base[seed].mean():.3f})" for seed in worse]
        paired = [row for row in own if row["seed"] not in worse]
        closed = gap.shares(paired, ("2 heads", gap.EQUAL), "kv.64", "twin")
        seeds = len(base)
        figures = [gap.mean(own, cell, asked) for cell, asked in COLUMNS.values()]
        lines.append([shape, f"{numbers:,}", str(seeds), *figures, gap.show(closed), gap.median(closed)])
    widths = [shape for shape in shapes if shape not in (TESTED, "mamba1")]
    features, found, bases = points(rows, widths)
    law, (low, high) = fit(features, found), intervals(features, found, bases)
    terms = zip(("", " base16", " log10(tokens / 3%)"), law, low, high, strict=True)
    (error, naive, levels), tests = errors(rows, TESTED, law, (features, found))
    of_mamba1, few = errors(rows, "mamba1", law, (features, found))
    better = "The better a base answers 16 pairs, the more of the gap the edit closes" if error < naive else "There is no law"
    better += ", but over bases the interval of this slope reaches 0" if error < naive and low[1] <= 0 else ""
    return PAGE.format(
        verdict=f"{better}: on an unseen width a linear law is off by {error:.2f}, the mean share by {naive:.2f}, and\n"
        f"two means, of bases that have learnt retrieval and of those that have not, by {levels:.2f}.",
        failed="; ".join(failed) or "none",
        limit=gap.BENCH.limit,
        equal=gap.EQUAL,
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
        law=" + ".join(f"{value:.2f} [{a:.2f}, {b:.2f}]{name}" for name, value, a, b in terms),
        edits=len(found),
        bases=len(np.unique(bases)),
        widths=", ".join(widths),
        tests=tests,
        others=len(np.unique(points(rows, [TESTED])[2])),
        tested=TESTED,
        error=error,
        naive=naive,
        levels=levels,
        few=few,
        mamba1=", ".join(f"{each:.3f}" for each in of_mamba1),
        rivals=rivals(rows),
        minutes=sum(row["cpu_seconds"] for row in rows if row["shape"] != "64") / 60,
    )


def draw(rows: list[Row], path: Any) -> None:
    """Share closed by the edit against what the base answers with 16 pairs: every base a point, and the law."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for shape, mark, color in zip(
        SHAPES, "v^os D".replace(" ", ""), ("#56b4e9", "#0072b2", "#009e73", "#d55e00", "#6b7280"), strict=True
    ):
        features, found, _ = points(of_shape(rows, shape), [shape])
        at = features[:, 2] == 0 if len(features) else []
        label = "Mamba-1, 64 wide" if shape == "mamba1" else f"Mamba-2, {shape} wide" + " (not fitted)" * (shape == TESTED)
        if len(features):
            axes.plot(features[at, 1], found[at], mark, color=color, markersize=6, alpha=0.8, label=label)
    widths = [shape for shape in SHAPES if shape not in (TESTED, "mamba1")]
    law = fit(*points([row for shape in widths for row in of_shape(rows, shape)], widths)[:2])
    line = np.linspace(0, 1, 101)
    axes.plot(
        line, predict(np.stack([np.ones(101), line, np.zeros(101)], 1), law), color="#111827", linewidth=1.2, label="the law"
    )
    axes.set(xlabel="what the base answers with 16 pairs", ylabel="share of the gap closed, 64 pairs", ylim=(-0.1, 1.1))
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, and write the page."""
    shapes = {"nargs": "*", "default": [name for name in SHAPES if name != "64"], "choices": SHAPES}
    given = gap.parse_arguments(__doc__, "write sizes.md and sizes.png", **{"--shapes": shapes})
    if given.seeds:
        measure_all(given.shapes, given.seeds)
    if given.page:
        write_text(gap.HERE / "sizes.md", write_page(read_rows()))
        draw(read_rows(), gap.HERE / "sizes.png")


if __name__ == "__main__":
    main()
