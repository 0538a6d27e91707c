"""What docs/evidence/ways.md says of the ways of choosing heads: from the record of the study `ways`."""

from pathlib import Path

from surgery.evaluation import markdown
from surgery.evaluation.results import value
from surgery.studies import Findings
from surgery.studies.ways import AGAINST, BASE, CHANGE, DEFAULT, HEADS, OF, UNSEEN, Ways, agreement

RECORD = Path(__file__).parent.parent / "recipes" / "ways.findings.json"


def findings() -> Findings:
    return Findings.read(RECORD, unsealed="refuse")


def ways() -> str:
    """All bases together, each base, and what the ways have in common."""
    record = findings()
    origin, recipe = record.provenance, record.provenance.recipe or {}
    figures = {row.what: row.figures for row in record.rows}
    order = [line.partition(":")[0] for line in record.summary.splitlines()]
    columns = [(base, count) for base, about in record.about.items() for count in sorted(about["sites"]["random"], key=int)]
    header = ["gain, by base and number of heads", *(f"{base}, {count}" for base, count in columns)]
    body = [["accuracy of the base", *(f"{value(figures[f'{base}{OF}{BASE}'][UNSEEN]):.3f}" for base, _ in columns)]]
    for way in order:
        cells = []
        for base, count in columns:
            of = figures.get(f"{base}{OF}{way}, {count}{HEADS}")
            mark = ""
            if of and UNSEEN + AGAINST in of:
                low, high = of[UNSEEN + AGAINST].ci95
                mark = " +" if low > 0 else " -" if high < 0 else ""
            cells.append("" if of is None else f"{value(of[UNSEEN + CHANGE]):+.3f}{mark}")
        body.append([way, *cells])
    alike = [
        [way, *(f"{share:.0%}" for share in agreement(record.about, way, DEFAULT))] for way in order if way != DEFAULT
    ]  # fmt: skip
    seeds = {about["seeds"] for about in record.about.values()}
    sizes = ", ".join(f"{base} {about['size']}" for base, about in record.about.items())
    return "\n\n".join(
        [
            markdown.table(*Ways.table(record)),
            "Gain in accuracy on dictionaries with keys not used in tuning, the mean over the bases that were measured with "
            "so many heads; cost: the mean over bases, for the largest number of heads, ranking included. A pass is one "
            "sequence through all layers; seconds are of the processor.",
            f"![{Ways.title}](../../recipes/ways.png)",
            markdown.table(header, body),
            f"`+` and `-`: better or worse than `{DEFAULT}`, by the paired 95% interval over questions, which knows nothing of "
            "other seeds of tuning.",
            markdown.table([f"chooses as {DEFAULT} does", "heads", "layers"], alike),
            f"Pairs of a dictionary: {sizes}. {recipe['tune']['steps']} steps of tuning, {', '.join(map(str, sorted(seeds)))} "
            f"seed of tuning, {recipe['bench']['limit']} questions; random: {len(_draws(record))} draws. Measured "
            f"{origin.created[:10]} on {origin.machine}, version {origin.toolkit}, seed {origin.seed} "
            f"(`recipes/{RECORD.name}`).",
        ]
    )


def _draws(record: Findings) -> list[list[str]]:
    about = next(iter(record.about.values()))
    draws: list[list[str]] = next(iter(about["sites"]["random"].values()))
    return draws
