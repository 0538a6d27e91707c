"""Who retrieves in each base, what each of these heads is needed for, and what attention in its place buys.

    python recipes/evidence/circuit/circuit.py                    all bases, about 15 minutes of one core each
    python recipes/evidence/circuit/circuit.py tiny-records       one of them
    python recipes/evidence/circuit/circuit.py tiny-records 7     with another seed
    python recipes/evidence/circuit/circuit.py figures            draws the circuits again, half a minute each

Writes circuit.json (one entry a base and seed; finished ones are kept), BASE.png (the circuit) and the tables of README.md.
"""

import json
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import surgery
from surgery.evaluation.statistics import estimate
from surgery.locating.circuit import draw_circuit
from surgery.models.anatomy import anatomy
from surgery.probes import make_probe
from surgery.probes.scoring import answer
from surgery.records.recipe import Examples
from surgery.records.site import Site, merge_sites
from surgery.runtime.files import read_text, write_text

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
BASES: dict[str, dict[str, Any]] = {  # base -> its dictionaries
    "tiny-records": {"pairs": 16, "between": 8},
    "tiny-records-mamba1": {"pairs": 16, "between": 8},
    "tiny-records-hybrid": {"pairs": 16, "between": 8},
    "tiny-records-llama": {"pairs": 16, "between": 8},
    "tiny-options": {"pairs": 16},
    "tiny-skills": {"pairs": 32},
    "tiny-mamba2": {"pairs": 32},
    "tiny-letters": {"pairs": 16},
    "tiny-letters-mamba1": {"pairs": 16},
    "tiny-hybrid": {"pairs": 32},
    "tiny-deltanet": {"pairs": 16},
    "tiny-kda": {"pairs": 16},
    "tiny-llama": {"pairs": 24},
}
LONG = ("tiny-records", "tiny-options")  # whose options have 9 or 10 words
EDITED = ("tiny-records", "tiny-records-mamba1")
PAIRED = ("tiny-options", "tiny-skills")
SEED, ASKED, HEADS = 3, 200, 2
STEPS = 60
BEGIN = "<!-- filled by circuit.py -->"


def probes_of(name: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """What is asked of a base: its dictionaries, multiple choice, and facts."""
    length = {"length": "long"} if name.startswith(LONG) else {}
    return {"retrieval": ("kv", BASES[name]), "multiple choice": ("choice", length), "facts": ("knowledge", {})}


def ask(model: Any, tokenizer: Any, asked: dict[str, list], sites: list[Site] | tuple[Site, ...] = ()) -> dict[str, Any]:
    """Accuracies of a model without what some heads hand to their output projections, at all tokens."""
    places, hooks = anatomy(model), []

    def silence(place: Any, head: int) -> Any:
        def zero(_: Any, given: tuple) -> tuple:
            columns = given[0].clone()
            columns[..., place.columns(head)] = 0
            return (columns, *given[1:])

        return place.out.register_forward_pre_hook(zero)

    for site in sites:
        place = next(each for each in places.mixers_of(site.layer) if each.first <= site.heads[0] < each.first + each.heads)
        hooks += [silence(place, head) for head in site.heads]
    try:
        return {
            what: estimate(answer(model, tokenizer, questions).correct.astype(float)).model_dump()
            for what, questions in asked.items()
        }
    finally:
        for hook in hooks:
            hook.remove()


def units_of(ranking: Any, names: Any) -> list[Any]:
    """The units of a ranking that a circuit names, those of groups one by one; a convolution has none."""
    groups = {group.name: group.sites for group in ranking.groups}
    sites = [site for name in names for site in groups.get(name, [head.site for head in ranking.heads if head.name == name])]
    found = [
        head
        for site in sites
        for head in ranking.heads
        if head.site.layer == site.layer and set(head.site.heads) <= set(site.heads)
    ]
    return list({head.site: head for head in found}.values())


def ask_pairs(base: Any, tokenizer: Any, ranking: Any, asked: dict[str, list]) -> dict[str, Any]:
    """Accuracies without each pair of heads of the layer in which a pair gathers for multiple choice."""
    (layer,) = {
        site.layer for group in ranking.groups if group.roles.role == "gather" and "+" in group.name for site in group.sites
    }
    pairs = [Site(layer, pair) for pair in combinations(range(anatomy(base).mixers_of(layer)[0].heads), 2)]
    return {site.name: ask(base, tokenizer, asked, [site]) for site in pairs}


def locate_both(model: Any, tokenizer: Any, name: str, seed: int) -> dict[str, Any]:
    """The rankings by dictionaries and by multiple choice, with all heads that lead either measured by position."""
    rankings = {}
    for what, (probe, options) in probes_of(name).items():
        if what != "facts":
            questions = make_probe(probe, tokenizer, **options).questions(128, seed)
            rankings[what] = surgery.locate(model, tokenizer, questions, surgery.Locate(probe=probe, options=options))
    return rankings


def draw(name: str, rankings: dict[str, Any]) -> None:
    """BASE.png, and BASE-choice.png, where a circuit was found."""
    for what, ranking in rankings.items():
        if (figure := draw_circuit(ranking)) is not None:
            figure.savefig(HERE / f"{name}{'' if what == 'retrieval' else '-choice'}.png", dpi=110, facecolor="white")


def chosen_sites(ranking: Any) -> dict[str, list[Site]]:
    """What is edited: SSM heads that aggregate, that gather, both, as many without a role of the same layers and of others, and
    all of the first aggregate head's layer."""
    circuit = ranking.circuit
    aggregate = [unit.site for unit in units_of(ranking, circuit.aggregate) if unit.kind == "ssm"][:HEADS]
    gather = [unit.site for unit in units_of(ranking, circuit.gather) if unit.kind == "ssm" and unit.site not in aggregate]
    gather, layers = gather[:HEADS], {site.layer for site in aggregate}
    named = {unit.site for unit in units_of(ranking, (*circuit.aggregate, *circuit.gather))}
    others = [unit.site for unit in reversed(ranking.heads) if unit.kind == "ssm" and unit.site not in named]
    found = {
        "aggregate heads": aggregate,
        "gather heads": gather,
        "both": aggregate + gather if gather else [],
        "no role, same layer": [site for site in others if site.layer in layers][: len(aggregate)],
        "no role, other layers": [site for site in others if site.layer not in layers][: len(aggregate)],
        "whole layer": [unit.site for unit in ranking.heads if aggregate and unit.site.layer == aggregate[0].layer],
    }
    return {what: list(merge_sites(sites)) for what, sites in found.items() if sites}


def edit(base: Any, tokenizer: Any, name: str, ranking: Any, seed: int) -> dict[str, Any]:
    """Attention at some heads, tuned alike: accuracies, the divergence on text, and bytes of cache at 2,048 tokens."""
    options, length = BASES[name], {"length": "long"} if name.startswith(LONG) else {}
    pairs = options["pairs"]
    tune = surgery.Tune(
        steps=STEPS,
        learning_rate=2e-3,
        batch_size=8,
        kl_weight=4.0,
        examples=(Examples(options=options | {"pairs": (pairs // 2, 2 * pairs)}),),
    )
    bench = surgery.Bench(
        suites=("kv", "knowledge", "text"),
        pairs=(pairs, 2 * pairs),
        between=options.get("between", 0),
        limit=ASKED,
        contexts=(),
        controls=(),
    )
    models, sites = {"base": base}, chosen_sites(ranking)
    for what, where in sites.items():
        plan = surgery.choose(base, tokenizer, ranking, surgery.PlanOptions(sites=tuple(where)), surgery.Data(), seed=seed)
        models[what] = surgery.splice(base, plan)
        surgery.tune(models[what], tokenizer, tune, seed=seed, name=what)
    report = surgery.bench(models, tokenizer, bench, seed=seed, main="aggregate heads", base_name=name)
    choice = make_probe("choice", tokenizer, **length).questions(ASKED, seed + 500)
    return {
        "sites": {what: [str(site) for site in where] for what, where in sites.items()},
        "multiple choice": {what: ask(model, tokenizer, {"choice": choice})["choice"] for what, model in models.items()},
        "report": report.model_dump(mode="json"),
    }


def measure(name: str, seed: int) -> dict[str, Any]:
    """One base."""
    base, tokenizer = surgery.load(str(ROOT / "checkpoints" / name))
    rankings = locate_both(base, tokenizer, name, seed)
    if seed == SEED:
        draw(name, rankings)
    probes = {what: make_probe(probe, tokenizer, **options) for what, (probe, options) in probes_of(name).items()}
    asked = {what: probe.questions(ASKED, seed + 500) for what, probe in probes.items()}
    entry: dict[str, Any] = {"base": name, "seed": seed, "asked": ASKED, "whole": ask(base, tokenizer, asked), "without": {}}
    for what, ranking in rankings.items():
        entry[what] = {"circuit": None, "accuracy": ranking.accuracy.model_dump(mode="json")}
        if ranking.circuit is None:
            continue
        entry[what]["circuit"] = ranking.circuit.model_dump(mode="json")
        for unit in (*ranking.circuit.gather, *ranking.circuit.aggregate):
            if sites := [each.site for each in units_of(ranking, [unit])]:
                entry["without"][unit] = ask(base, tokenizer, asked, sites)
    if name in PAIRED:
        entry["pairs"] = ask_pairs(base, tokenizer, rankings["multiple choice"], asked)
    if name in EDITED and rankings["retrieval"].circuit is not None:
        entry["edits"] = edit(base, tokenizer, name, rankings["retrieval"], seed)
    return entry


def tables(entries: list[dict[str, Any]]) -> str:
    """What was measured, as Markdown."""

    def shown(figures: dict[str, Any]) -> str:
        return " | ".join(f"{figures[what]['mean']:.3f}" for what in ("retrieval", "multiple choice", "facts"))

    lines = ["## Who does what", "", "| base | asked | the circuit |", "|---|---|---|"]
    for entry in entries:
        for what in ("retrieval", "multiple choice"):
            accuracy, circuit = entry[what]["accuracy"]["mean"], entry[what]["circuit"]
            lines.append(f"| {entry['base']} | {what}, {accuracy:.2f} | {circuit['sentence'] if circuit else 'no spans'} |")
    lines += ["", "## Without one unit of the circuit", ""]
    lines += ["| base | without | retrieval | multiple choice | facts |", "|---|---|---|---|---|"]
    for entry in entries:
        lines.append(f"| {entry['base']} | | {shown(entry['whole'])} |")
        lines += [f"| | {unit} | {shown(figures)} |" for unit, figures in entry["without"].items()]
    for entry in entries:
        if "pairs" not in entry:
            continue
        pairs = sorted(entry["pairs"].items(), key=lambda pair: pair[1]["multiple choice"]["mean"])
        lines += [
            "",
            f"## Pairs of heads of one layer of {entry['base']}",
            "",
            f"The three of {len(pairs)} that cost most in multiple choice.",
            "",
        ]
        lines += ["| without | retrieval | multiple choice | facts |", "|---|---|---|---|"]
        lines += [f"| {pair} | {shown(figures)} |" for pair, figures in pairs[:3]]
    for entry in entries:
        if "edits" not in entry:
            continue
        report, chosen = entry["edits"]["report"]["models"], entry["edits"]["multiple choice"]
        names = [name for name in report["base"]["results"] if name.startswith(("kv", "knowledge"))]
        lines += ["", f"## Attention in {entry['base']}, at", ""]
        lines += [f"| | heads | {' | '.join(names)} | multiple choice | KL on text |", "|---" * (len(names) + 4) + "|"]
        for what, model in report.items():
            figures = " | ".join(f"{model['results'][name]['mean']:.3f}" for name in names)
            kl = f"{model['on_text']['kl']['mean']:.1e}" if model.get("on_text") else ""
            sites = [Site.parse(site) for site in entry["edits"]["sites"].get(what, ())]
            heads = "; ".join(site.name for site in sites)
            lines.append(f"| {what} | {heads} | {figures} | {chosen[what]['mean']:.3f} | {kl} |")
    return "\n".join(lines)


def main(*given: str) -> None:
    record = HERE / "circuit.json"
    entries = json.loads(read_text(record)) if record.exists() else []
    if given == ("figures",):
        for name in BASES:
            draw(name, locate_both(*surgery.load(str(ROOT / "checkpoints" / name)), name, SEED))
        return
    names = [each for each in given if not each.isdecimal()]
    seed = next((int(each) for each in given if each.isdecimal()), SEED)
    for name in names or BASES:
        if not any(entry["base"] == name and entry["seed"] == seed for entry in entries):
            entries.append(measure(name, seed))
            write_text(record, json.dumps(entries, indent=1) + "\n")
    entries.sort(key=lambda entry: (list(BASES).index(entry["base"]), entry["seed"]))
    page = read_text(HERE / "README.md")
    write_text(HERE / "README.md", page[: page.index(BEGIN) + len(BEGIN)] + "\n\n" + tables(entries) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
