"""The first figure of the README, from three records and nothing else.

    python recipes/evidence/front.py        writes docs/images/front.png

Left: the demo's accuracies (demo/report.json). Middle: gain, multiple choice and the divergence from the base on text, under
the scalar gate and two kinds of null key, with the same heads and steps (gate/skills.json). Right: the share of the gap
between a base and its twin, which had attention from the start, that an edit and its rivals close with 3% of the tokens: a
point a seed, a bar at the median (gap/gap.jsonl).
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
BLUE, ORANGE, INK, QUIET = "#0072b2", "#d55e00", "#24292f", "#6b7280"
MODELS = {
    "base": ("base", INK),
    "tuned": ("attention at 2 located heads", BLUE),
    "control_tuned": ("no attention, tuned", ORANGE),
}
GATES = {
    "scalar 0.5": "attention at\nevery token",
    "constant": "where a\nkey matches",
    "fitted": "where the query\nasks for it",
}
ASKED = {"kv.64": ("64 pairs", BLUE, "o"), "multiple_choice": ("multiple choice", ORANGE, "s")}
RIVALS = {
    ("2 heads", 0.03): "2 located heads",
    ("same layer", 0.03): "2 other heads, same layer",
    ("other layer", 0.03): "2 heads, another layer",
    ("all weights", 0.03): "all weights tuned",
    ("adapters", 0.03): "adapters",
    ("prompt twice", 0.0): "prompt read twice",
}


def draw_demo(axes: Any) -> None:
    """Accuracy with 16 and 64 pairs, with intervals."""
    models = json.loads((HERE / "demo" / "report.json").read_text())["models"]
    pairs = [16, 64]
    for name, (label, colour) in MODELS.items():
        found = [models[name]["results"][f"kv.{count}"] for count in pairs]
        means = np.array([each["mean"] for each in found])
        low, high = ([each[end] for each in found] for end in ("low", "high"))
        errors, text = [means - low, high - means], f"{label}: {means[-1]:.2f} with 64"
        axes.errorbar(pairs, means, yerr=errors, color=colour, marker="o", capsize=3, linewidth=1.8, label=text)
    axes.legend(loc="lower left", frameon=False, fontsize=9, labelcolor="linecolor", handlelength=1.2)
    axes.set(xscale="log", xticks=pairs, xticklabels=pairs, ylim=(0, 1.05), xlim=(14, 72), xlabel="pairs in the dictionary")
    axes.minorticks_off()
    axes.set_ylabel("questions answered correctly")
    axes.set_title("It retrieves", loc="left")


def draw_gates(axes: Any) -> None:
    """64 pairs and multiple choice under three gates, with the divergence on text; means over seeds, and each seed."""
    seeds = [bases["tiny-skills"] for bases in json.loads((HERE / "gate" / "skills.json").read_text())["seeds"].values()]
    for aside, (what, (label, colour, mark)) in zip((-0.09, 0.09), ASKED.items(), strict=True):
        base = np.mean([cells["base"][what]["mean"] for cells in seeds])
        axes.axhline(base, color=colour, linestyle="--", linewidth=1)
        for place, gate in enumerate(GATES):
            each = [cells[gate][what]["mean"] for cells in seeds]
            axes.plot([place + aside] * len(each), each, mark, color=colour, alpha=0.35, markersize=4, clip_on=False)
            named = f"{label} (dashed: base, {base:.2f})" if not place else None
            axes.plot(place + aside, np.mean(each), mark, color=colour, markersize=8, label=named, clip_on=False)
    kls = [np.mean([cells[gate]["on_text"]["kl"]["mean"] for cells in seeds]) for gate in GATES]
    ticks = [f"{text}\nKL {kl:.0e}" if kl else f"{text}\nKL 0" for text, kl in zip(GATES.values(), kls, strict=True)]
    axes.set(xticks=range(len(GATES)), xticklabels=ticks, xlim=(-0.5, 2.5), ylim=(0, 1.05))
    axes.legend(loc="center left", frameon=False, fontsize=9, labelcolor="linecolor")
    axes.set_title(f"What it changes besides ({len(seeds)} seeds)", loc="left")


def draw_shares(axes: Any) -> None:
    """The share of the gap that each way closes, a point a seed, and the median."""
    rows = [json.loads(line) for line in (HERE / "gap" / "gap.jsonl").read_text().splitlines()]
    scores = {(row["model"], row["share"], row["seed"]): row["results"]["kv.64"]["mean"] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    for height, (cell, _) in enumerate(RIVALS.items()):
        base, twin = (np.array([scores[name, 0.0, seed] for seed in seeds]) for name in ("base", "twin"))
        shares = (np.array([scores[*cell, seed] for seed in seeds]) - base) / (twin - base)
        colour = ORANGE if height else BLUE
        spread = height + np.linspace(-0.22, 0.22, len(seeds))
        axes.plot(shares, spread, "o", color=colour, alpha=0.45, markersize=5, clip_on=False)
        axes.plot([np.median(shares)] * 2, [height - 0.33, height + 0.33], color=colour, linewidth=2.5)
    axes.axvline(1, color=QUIET, linestyle="--", linewidth=1)
    axes.axvline(0, color=QUIET, linewidth=0.8)
    axes.set(yticks=range(len(RIVALS)), yticklabels=list(RIVALS.values()), xlabel="share of the gap to training with attention")
    axes.invert_yaxis()
    axes.set_title(f"How much of the gap ({len(seeds)} bases)", loc="left")


def main(out: Path) -> None:
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold"})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13.2, 3.7), layout="constrained", width_ratios=(1, 1.1, 1.1))
    draw_demo(left)
    draw_gates(middle)
    draw_shares(right)
    figure.savefig(out, dpi=110, facecolor="white")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images" / "front.png")
