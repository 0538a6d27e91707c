"""The null key beside the scalar gate of 0.30: same base, heads, steps, seeds and questions.

    python recipes/evidence/gate/gate.py              all bases, about 20 minutes of one core
    python recipes/evidence/gate/gate.py tiny-skills  one of them

Writes gate.json (one entry a base and seed; finished ones are kept), gate.png, and the first tables of README.md.
"""

import json
import sys
from pathlib import Path

import surgery
from surgery.records.recipe import Examples
from surgery.records.site import Site
from surgery.runtime.files import write_text

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
BASES = {  # base -> pairs of the dictionaries that locate asks, and units that are grafted
    "tiny-skills": (32, 2),
    "tiny-letters": (16, 2),
    "tiny-mamba2": (32, 2),
    "tiny-letters-mamba1": (16, 4),
}
GATES = {  # name -> gate, share of text, closed below
    "scalar 0.5": (0.5, None, 0.0),
    "scalar 1": (1.0, None, 0.0),
    "null key, share 0.05, g 0.5": (0.5, 0.05, 0.02),
    "null key, share 0.01, g 1": (1.0, 0.01, 0.02),
    "null key, share 0.001, g 1": (1.0, 0.001, 0.02),
}
SEEDS = (3,)
HEAD = "| gate | 64 pairs | unseen keys | multiple choice | facts | KL on text | tokens on which it acts |"
BEGIN, END = "<!-- filled by gate.py -->", "<!-- to here -->"
TUNE = surgery.Tune(
    steps=50, learning_rate=2e-3, batch_size=8, kl_weight=4.0, examples=(Examples(options={"pairs": (16, 64)}),)
)
BENCH = surgery.Bench(pairs=(16, 64), limit=300, windows=64, contexts=(), controls=())


def measure(name: str, seed: int) -> dict:
    """One base: the same two heads under each gate, untrained and tuned, on the same questions."""
    from surgery.probes import make_probe, training_options

    pairs, units = BASES[name]
    base, tokenizer = surgery.load(str(ROOT / "checkpoints" / name))
    probe = make_probe("kv", tokenizer, **training_options("kv", {"pairs": pairs}))
    ranking = surgery.locate(base, tokenizer, probe.questions(128, seed), surgery.Locate(roles=0, options={"pairs": pairs}))
    models = {"base": base}
    for gate, (g, share, closed) in GATES.items():
        options = surgery.PlanOptions(heads=units, gate=g, share=share, closed_below=closed)
        plan = surgery.choose(base, tokenizer, ranking, options, surgery.Data(), seed=seed)
        models[f"{gate}, untrained"] = surgery.splice(base, plan)
        models[gate] = surgery.splice(base, plan)
        surgery.tune(models[gate], tokenizer, TUNE, seed=seed, name=gate)
    report = surgery.bench(models, tokenizer, BENCH, seed=seed, main="null key, share 0.01, g 1", base_name=name)
    return {"base": name, "seed": seed, "sites": [str(site) for site in plan.sites], "report": report.model_dump(mode="json")}


def heads_of(entry: dict) -> str:
    """Where a base was grafted, in short."""
    return ", ".join(Site.parse(site).name for site in entry["sites"])


def tables(entries: list[dict]) -> str:
    """A table a base: accuracies, the divergence on text, and the share of its tokens on which the gate acts."""
    fitted = json.loads((HERE / "skills.json").read_text())["seeds"][str(SEEDS[0])] if (HERE / "skills.json").exists() else {}
    columns, lines = ("kv.64", "kv_unseen.64", "multiple_choice", "knowledge"), []
    for entry in entries:
        models, ways = entry["report"]["models"], fitted.get(entry["base"], {})
        rows = {"base": (models["base"]["results"], None)}
        rows |= {gate: (models[gate]["results"], models[gate]["on_text"]) for gate in GATES}
        for way in (", untrained", ""):
            if f"fitted{way}" in ways:
                rows[f"reads the query, g 1{way}"] = (ways[f"fitted{way}"],) * 2
        lines += ["", f"`{entry['base']}`, {heads_of(entry)}", "", HEAD, "|---" * 7 + "|"]
        for gate, (results, text) in rows.items():
            on_text = text.get("on_text", text) if text else None
            shown = " | ".join(f"{results[column]['mean']:.3f}" for column in columns)
            acts = f"{on_text['kl']['mean']:.2g} | {on_text['acts']['mean']:.3f}" if on_text else "|"
            lines.append(f"| {gate} | {shown} | {acts} |")
    return "\n".join(lines)


def draw(entries: list[dict]) -> None:
    """Accuracy with 64 pairs, and in multiple choice, against the divergence from the base on text; a column a base."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    entries = [entry for entry in entries if entry["seed"] == SEEDS[0]]
    fitted = json.loads((HERE / "skills.json").read_text())["seeds"][str(SEEDS[0])] if (HERE / "skills.json").exists() else {}
    figure, panels = plt.subplots(2, len(entries), figsize=(3.6 * len(entries), 6.4), sharex=True, squeeze=False)
    least, marks = 1e-9, dict(zip(GATES, "sDo^v", strict=True))
    for column, entry in zip(panels.T, entries, strict=True):
        models = entry["report"]["models"]
        for axes, what in zip(column, ("kv.64", "multiple_choice"), strict=True):
            for gate, mark in marks.items():
                kl, colour = models[gate]["on_text"]["kl"]["mean"], "#d55e00" if gate.startswith("scalar") else "#0072b2"
                accuracy = models[gate]["results"][what]["mean"]
                axes.plot(max(kl, least), accuracy, mark, color=colour, markersize=8, label=gate, linestyle="")
            if (reads := fitted.get(entry["base"], {}).get("fitted")) is not None:
                kl, accuracy = reads["on_text"]["kl"]["mean"], reads[what]["mean"]
                label = "null key that reads the query, g 1"
                axes.plot(max(kl, least), accuracy, "*", color="#009e73", markersize=13, label=label, linestyle="")
            base = models["base"]["results"][what]["mean"]
            axes.axhline(base, color="#6b7280", linestyle="--", linewidth=1, label="base")
            axes.set(xscale="log", xlim=(least / 2, 1), ylim=(-0.02, 1.05))
        column[0].set_title(f"{entry['base']}\n{heads_of(entry)}", fontsize=10)
        column[1].set_xlabel(f"KL from the base on text, nats a token\n(less is drawn at {least:g})", fontsize=8)
    panels[0][0].set_ylabel("accuracy, 64 pairs")
    panels[1][0].set_ylabel("accuracy, multiple choice")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(HERE / "gate.png", dpi=130)


def main(*names: str) -> None:
    record = HERE / "gate.json"
    entries = json.loads(record.read_text()) if record.exists() else []
    done = {(entry["base"], entry["seed"]) for entry in entries}
    for name in names or BASES:
        for seed in SEEDS:
            if (name, seed) not in done:
                entries.append(measure(name, seed))
                write_text(record, json.dumps(entries, indent=1) + "\n")
    entries.sort(key=lambda entry: (list(BASES).index(entry["base"]), entry["seed"]))
    draw(entries)
    page = HERE / "README.md"
    before, _, rest = page.read_text().partition(BEGIN)
    write_text(page, f"{before}{BEGIN}\n{tables(entries)}\n\n{rest[rest.index(END) :]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
