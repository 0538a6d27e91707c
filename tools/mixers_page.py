"""What docs/evidence/mixers.md says of every kind of mixer: from the findings of the study of seeds, a base for each kind."""

from pathlib import Path
from statistics import fmean

from surgery.evaluation import markdown
from surgery.evaluation.results import value
from surgery.statistics import Proportion
from surgery.studies import Findings
from surgery.studies.seeds import BASE, CONTROL, ELSEWHERE, SEED, TEXT, UNTRAINED

RECIPES = Path(__file__).parent.parent / "recipes"
RECORDS = {
    "Mamba-2": "seeds",
    "Mamba-1": "seeds-mamba1",
    "Gated DeltaNet": "seeds-deltanet",
    "Kimi Delta Attention": "seeds-kda",
    "mLSTM": "seeds-mlstm",
    "Lightning": "seeds-lightning",
}
COLUMNS = {
    "base": BASE,
    "grafted, not trained": UNTRAINED,
    "tuned": None,  # in the first way
    "control: tuned without a graft": CONTROL,
    "control: grafts at random heads of other layers, tuned": ELSEWHERE,
}


def files() -> dict[Path, str]:
    """The findings that are there, and of which kind of mixer each is."""
    return {path: kind for kind, name in RECORDS.items() if (path := RECIPES / f"{name}.findings.json").exists()}


def table() -> str:
    """A row for every kind of mixer, over all seeds: retrieval at the largest size, of base, grafts and controls, and the
    cost."""
    body, limits, numbers = [], set(), []
    for path, kind in files().items():
        result = Findings.read(path)
        size = max(int(figure[3:]) for figure in result.rows[0].figures if figure.startswith("kv."))
        accuracies: dict[str, list[float]] = {}
        seeds = set()
        for row in result.rows:
            accuracy = row.figures[f"kv.{size}"]
            assert isinstance(accuracy, Proportion)
            model, _, seed = row.what.rpartition(SEED)
            accuracies.setdefault(model, []).append(accuracy.accuracy)
            limits.add(accuracy.n)
            seeds.add(seed)
        first = next(iter((result.provenance.recipe or {})["study"].get("ways", {"tuned": {}})))
        cost = max(value(row.figures[TEXT]) for row in result.rows if row.what.startswith(f"{first}{SEED}"))
        numbers.append(len(seeds))
        of = "" if len(seeds) == max(numbers) else f" ({len(seeds)} seed{'s' * (len(seeds) != 1)})"
        figures = [_spread(accuracies.get(model or first, [])) for model in COLUMNS.values()]
        body.append([kind + of, f"`{Path(result.provenance.base).name}`", str(size), *figures, f"{cost:+.3f}"])
    return f"""{markdown.table(["mixer", "base", "pairs", *COLUMNS, "cost: loss on text"], body)}

Accuracy of retrieval: the mean of {max(numbers)} seeds of locating, tuning and measuring (the lowest to the highest);
{min(limits):,} examples a cell. Cost: how much the loss on text rises in the tuned hybrid, in nats per token, on the worst \
seed."""


def _spread(values: list[float]) -> str:
    return "not measured" if not values else f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
