"""Are the controls without attention beaten only because they learn more slowly, or at another rate?

    python recipes/evidence/automatic/patience.py    measure what patience.json does not hold yet, about an hour of one core

The base of each report beside this file, with no graft, at three learning rates until the loss on examples that are kept back
is flat (tune.steps=auto, at most 2,000 steps), then for 2,000 steps at the rate whose loss was least. Examples, weights of
losses, seed and layers are the report's. Writes patience.json after every tuning, and its table in README.md.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch

import surgery
from surgery.evaluation.statistics import estimate
from surgery.probes import make_probe
from surgery.probes.scoring import answer
from surgery.records.plan import Plan
from surgery.records.recipe import Lora
from surgery.records.report import Report
from surgery.runtime.files import read_text, write_text
from surgery.tuning.controls import trainable_control

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
RECORD = HERE / "patience.json"
BASES = ("tiny-letters", "tiny-skills", "tiny-letters-mamba1")
CONTROLS = {"tuned": "the same layers tuned", "adapters": "adapters on all layers"}
RATES, MOST, ASKED = (5e-4, 1e-3, 2e-3), 2000, 300
BEGIN, END = "<!-- filled by patience.py -->", "<!-- end -->"
Row = dict[str, Any]


def measure(name: str, control: str, rate: float, auto: bool) -> Row:
    """One tuning: steps, the loss on what is kept back at first and at last, and accuracy with 64 pairs."""
    report = Report.read(HERE / f"{name}.json")
    assert report.provenance is not None
    base, tokenizer = surgery.load(str(ROOT / "checkpoints" / name))
    recipe = surgery.read_recipe(None, [f"model={ROOT / 'checkpoints' / name}"])
    given = {**(report.provenance.recipe or {})}["tune"] | {"learning_rate": rate, "max_steps": MOST}
    given |= {
        "steps": "auto" if auto else MOST,
        "lora": Lora(target_modules=("in_proj", "out_proj")) if control == "adapters" else None,
    }
    model = trainable_control(base, Plan(sites=tuple(report.main.sites)), control)
    log = surgery.tune(
        model, tokenizer, surgery.Tune.model_validate(given), recipe.data, name=f"{name}, {control}, {rate:g}", teacher=base
    )
    losses = [step["held_out"] if auto else step["examples"] for step in log.steps if auto <= ("held_out" in step)]
    row: Row = {
        "base": name,
        "control": control,
        "rate": rate,
        "auto": auto,
        "steps": len(log.steps),
        "losses": [losses[0], losses[-1]],
    }
    for keys in ("seen", "unseen"):
        questions = make_probe("kv", tokenizer, pairs=64, keys=keys).questions(ASKED, 1000)
        row[keys] = estimate(answer(model, tokenizer, questions).correct.astype(float)).model_dump()
    return row


def missing(rows: list[Row]) -> list[tuple[str, str, float, bool]]:
    """(base, control, rate, until flat) of tunings that are to be done; the long one is known when the three rates are."""
    done = {(row["base"], row["control"], row["rate"], row["auto"]) for row in rows}
    wanted = []
    for name in BASES:
        for control in CONTROLS:
            flat = [row for row in rows if (row["base"], row["control"], row["auto"]) == (name, control, True)]
            wanted += [(name, control, rate, True) for rate in RATES]
            if len(flat) == len(RATES):
                wanted.append((name, control, min(flat, key=lambda row: row["losses"][-1])["rate"], False))
    return [cell for cell in wanted if cell not in done]


def table(rows: list[Row]) -> str:
    lines = [
        "| base | without attention | until flat: steps, 64 pairs, by rate | 2,000 steps | new keys | the edit |",
        "|---" * 6 + "|",
    ]
    for name in BASES:
        edit = Report.read(HERE / f"{name}.json").main.results
        for control, words in CONTROLS.items():
            own = [row for row in rows if (row["base"], row["control"]) == (name, control)]
            if not own:
                continue
            flat = [f"{row['rate']:g}: {row['steps']}, {row['seen']['mean']:.3f}" for row in own if row["auto"]]
            long = [row for row in own if not row["auto"]]
            shown = [
                f"{row[keys]['mean']:.3f} [{row[keys]['low']:.3f}, {row[keys]['high']:.3f}]"
                for row in long
                for keys in ("seen", "unseen")
            ]
            edited = f"{edit['kv.64'].mean:.3f}, new keys {edit['kv_unseen.64'].mean:.3f}"
            lines.append(f"| `{name}` | {words} | {'; '.join(flat)} | {' | '.join(shown or ['-', '-'])} | {edited} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and fill the table."""
    torch.set_num_threads(1)
    rows: list[Row] = json.loads(read_text(RECORD)) if RECORD.exists() else []
    while todo := missing(rows):
        rows.append(measure(*todo[0]))
        write_text(RECORD, json.dumps(rows, indent=1) + "\n")
    page, text = read_text(HERE / "README.md"), f"{BEGIN}\n\n{table(rows)}\n\n{END}"
    write_text(HERE / "README.md", re.sub(f"{BEGIN}.*?{END}", lambda _: text, page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
