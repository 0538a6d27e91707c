"""Is multiple choice two heads in every base that is trained alike, or only in `tiny-options`?

    python recipes/evidence/circuit/seeds.py 1 2 3     makes tiny-skills and tiny-options from other seeds: half an hour each

Each seed is trained from scratch by the recipes of the two bases. Then every head and every pair of heads of a layer is
ablated at all tokens, whatever `locate` names, so that a pair which the roles miss would be seen. Writes seeds.json and the
table of README.md. Trainings go on where they were cut short, in runs/circuit.
"""

import json
import subprocess
import sys
from itertools import combinations
from typing import Any

import yaml
from circuit import ASKED, HERE, ROOT, ask, locate_both, probes_of

import surgery
from surgery.models.anatomy import anatomy
from surgery.probes import make_probe
from surgery.records.site import Site
from surgery.runtime.files import read_text, write_text

NAME, RECORD = "tiny-options", HERE / "seeds.json"
SEEDS, CIRCUIT = "<!-- filled by seeds.py -->", "<!-- filled by circuit.py -->"


def make(seed: int) -> Any:
    """The folder of tiny-options from another seed, made where it is not there yet."""
    runs = ROOT / "runs" / "circuit"
    runs.mkdir(parents=True, exist_ok=True)
    start = None
    for name in ("tiny-skills", NAME):
        recipe = yaml.safe_load(read_text(ROOT / "recipes" / "pretraining" / f"{name}.yaml")) | {"seed": 100 * seed}
        recipe |= {"start": str(start.relative_to(ROOT))} if start else {}
        start = runs / f"{name}-{seed}"
        if not (start / "measured.json").exists():
            file = runs / f"{name}-{seed}.yaml"
            write_text(file, yaml.safe_dump(recipe, sort_keys=False))
            script = ROOT / "recipes" / "pretraining" / "train.py"
            subprocess.run([sys.executable, str(script), str(file), "--out", str(start)], check=True)
    return start


def measure(seed: int) -> dict[str, Any]:
    """What each head, and each pair of heads of a layer, costs; and what locate names."""
    base, tokenizer = surgery.load(str(make(seed)))
    asked = {what: make_probe(probe, tokenizer, **own).questions(ASKED, 500) for what, (probe, own) in probes_of(NAME).items()}
    ranking = locate_both(base, tokenizer, NAME, 0)["multiple choice"]
    places = anatomy(base).mixers
    heads = [Site(place.layer, (head,)) for place in places for head in range(place.heads)]
    pairs = [Site(place.layer, pair) for place in places for pair in combinations(range(place.heads), 2)]
    return {
        "seed": seed,
        "asked": ASKED,
        "whole": ask(base, tokenizer, asked),
        "sentence": ranking.circuit.sentence if ranking.circuit else "",
        "gather": list(ranking.circuit.gather) if ranking.circuit else [],
        "without": {site.name: ask(base, tokenizer, asked, [site]) for site in (*heads, *pairs)},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """By seed: the base, and the single head and the three pairs that cost most in multiple choice."""
    lines = ["| seed | without | retrieval | multiple choice | facts |", "|---|---|---|---|---|"]
    for row in rows:
        singles = sorted((cost(figures), name) for name, figures in row["without"].items() if "," not in name)
        pairs = sorted((cost(figures), name) for name, figures in row["without"].items() if "," in name)
        for name in ("", singles[0][1], *(name for _, name in pairs[:3])):
            figures = row["without"][name] if name else row["whole"]
            shown = " | ".join(f"{figures[what]['mean']:.3f}" for what in ("retrieval", "multiple choice", "facts"))
            lines.append(f"| {'' if name else row['seed']} | {name} | {shown} |")
    return "\n".join(lines)


def cost(figures: dict[str, Any]) -> float:
    """What multiple choice comes down to."""
    return float(figures["multiple choice"]["mean"])


def main(*seeds: str) -> None:
    rows = json.loads(read_text(RECORD)) if RECORD.exists() else []
    for seed in map(int, seeds):
        if seed not in {row["seed"] for row in rows}:
            rows.append(measure(seed))
            write_text(RECORD, json.dumps(rows, indent=1) + "\n")
    page = read_text(HERE / "README.md")
    before, _, rest = page.partition(SEEDS)
    write_text(HERE / "README.md", f"{before}{SEEDS}\n\n{table(rows)}\n\n{rest[rest.index(CIRCUIT) :]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
