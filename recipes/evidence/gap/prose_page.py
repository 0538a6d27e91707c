"""The page of prose.py: prose.md and prose.png, from prose.jsonl and the records of other bases."""

import textwrap
from collections import Counter
from itertools import permutations, product
from pathlib import Path
from typing import Any

import gap
import numpy as np
from prose import (
    BRIEF,
    CLOSER,
    CLOSER_BY,
    HINTED,
    LENGTH,
    LENGTHS,
    LONG,
    OTHERS,
    RIVALS,
    SHAPES,
    UNTRAINED,
    Row,
    list_cells,
    record_of,
)
from scipy.stats import spearmanr

from surgery.evaluation.statistics import share_closed
from surgery.records.site import Site
from surgery.runtime.files import write_text

WORDS = gap.RIVALS | gap.EDITS | {name: f"**the twin: {words}**" for name, words in gap.TWINS.items()}
WORDS |= {"2 heads": "two located heads", "hints": "two located heads with hints, without null keys"}
WORDS |= {kind: f"two heads, located by {kind} and tuned on them" for kind in OTHERS}
WORDS[CLOSER] = f"two located heads, held to the base with a KL weight of {CLOSER_BY:.0f}, not 1"
WORDS[HINTED] = f"two located heads with hints and a KL weight of {CLOSER_BY:.0f}"
WORDS |= {"copy cache": "an n-gram cache of the text, without weights", "other layer": "two heads of other layers"}
COLUMNS = {f"bigrams.{LENGTH}": "bigrams", f"bigrams.{LENGTHS[-1]}": f"bigrams, {LENGTHS[-1]:,} tokens"}
COLUMNS["text"] = "all tokens"
QUESTIONS = {  # what an edit is located and tuned on -> (its cell, what it is asked)
    "repeated bigrams": (("2 heads", gap.EQUAL), f"bigrams.{LENGTH}"),
    "dictionaries": (("dictionaries", gap.EQUAL), "kv.32"),
    "joint recall": (("joint recall", gap.EQUAL), "joint.16"),
    "questions": (("questions", gap.EQUAL), "questions"),
}
ANSWERS = {asked: kind for kind, (_, asked) in list(QUESTIONS.items())[1:]}
ANSWERING = [("base", 0.0), ("twin", 0.0), ("copy cache", 0.0), ("adapters", gap.EQUAL), ("all weights", gap.EQUAL)]
ANSWERING += [("2 heads", gap.EQUAL), (HINTED, gap.EQUAL)]
FEWEST = 6  # pairs of kinds, of which a correlation is printed
SEEN = {"text": "of novels", "kv": "in dictionaries", "joint": "in joint recall"}
MAIN, BASE_CELL = ("2 heads", gap.EQUAL), ("base", 0.0)
PAGE = """# The gap on prose

{verdict}

{seeds}; {cells} models are measured{missing}. A base is a Mamba-2 of {numbers:,} parameters and has seen {tokens}; its twins
have seen the same in the same order. The novels are those of [tiny-names](../../../checkpoints/tiny-names/README.md). Rare
tokens in them had exchanged names in each window, and some windows repeated a passage of their own. The edit is attention at
two located heads with null keys, tuned for {equal:.0%} of all these tokens on the repeated rare bigrams of other novels, and
held to the base on all other tokens; its rivals are tuned alike. What counts is the loss on novels by authors of whom nothing
was learnt, with their own names: {windows} rows of {length} tokens. A repeated rare bigram is a pair of tokens that stood in
the row before and is rare elsewhere; about {rare:.0%} of the tokens are. Nats saved against the base, means over seeds; the
base's own loss is {own}.

{table}

Share closed: (edited - base) / (twin - base), with the twin that has attention at the same heads; over all seeds with
Fieller's interval, which is wide where seeds differ.{gap_of_all} Rivals are tuned as the edit is, for as many tokens at one
learning rate, without hints, and none for longer; the window takes the bytes of the edit's cache of a tuning row. The n-gram
cache has three numbers, set on 32 rows of the tuning text. `surgery run` also takes hints and a KL weight of {closer:.0f}, but
it locates and tunes on dictionaries.

![Nats saved, every seed a point](prose.png)

## Other bases

The same with fewer models, on the same tokens, the edit tuned on repeated bigrams alone. A head of a Mamba-1 is a block of 16
channels. The second table has what models answer of dictionaries, joint recall and questions, and in brackets the share closed,
by seed, where a gap to the twin is shown.

{others}

## What tuning on one kind of question does for another

Each edit is two heads, located by one kind of question and tuned on rows of it and of text with {equal:.0%} of the tokens.
Dictionaries have 32 pairs; the 16 keys of joint recall are of two words, each of which is in four. The {asked} questions
are about running text (who, where, which number): they repeat a sentence of a passage up to the answer (`running_text.py`),
of novels from which no model has learnt, including those of locating; without the question, these guesses score {guessed}.
Means over seeds; of questions, in brackets, the share closed by seed. Of dictionaries and joint recall the twin, whose
attention is at the heads for bigrams, learnt less than its base. The tokenizer has a token for each digit. These answers were
scored, and edits tuned, by commit e3d5047b, before the line break belonged to a number that begins another ("3", "31").

{transfer}

What an edit for one kind gains on each, as a share of what the edit for that kind gains there (with its interval over
questions); the heads that both have; and how alike the slopes are by which all heads were ranked (Spearman, mean over seeds):

{pairs}

{predictor}

{minutes:.0f} minutes of processor time. `prose.py` measures, and writes this page; `prose.jsonl` is the record.
"""


def read_rows(shape: str | None = None) -> list[Row]:
    return sorted(gap.read_rows(record_of(shape)), key=lambda row: row["seed"])


def of_all_seeds(rows: list[Row]) -> list[Row]:
    """Those of models that all seeds have."""
    counts = Counter((row["model"], row["share"]) for row in rows)
    return [row for row in rows if counts[row["model"], row["share"]] == len({row["seed"] for row in rows})]


def saved(rows: list[Row], cell: tuple[str, float], asked: str) -> list[float]:
    """By how many nats a model's loss is below its base's, seed by seed."""
    model, base = gap.values(rows, cell, asked), gap.values(rows, BASE_CELL, asked)
    return [float(base[seed].mean() - model[seed].mean()) for seed in sorted(model)]


def recalls(row: Row) -> bool:
    """Whether a model loses less on repeated rare bigrams than on other tokens."""
    return bool(row["results"][f"bigrams.{LENGTH}"]["mean"] < row["results"][f"other_tokens.{LENGTH}"]["mean"])


def named(cell: tuple[str, float]) -> str:
    name, share = cell
    words = WORDS[name]
    if name in ("2 heads", "hints", *OTHERS):
        words += f", {share:.1%} of the tokens" if share else ", untrained"
    return words


def savings(rows: list[Row], cells: list[tuple[str, float]]) -> list[list[str]]:
    """Of each of these models that is measured: what it saves, at what price, and the share closed."""
    at = {(row["model"], row["share"]): row for row in rows}
    head = ["nats saved", "parameters trained", "cache, 2,048 tokens", *COLUMNS.values()]
    lines = [[*head, "share closed of bigrams, by seed", "over all seeds", "of all tokens, by seed"]]
    for cell in (cell for cell in cells[1:] if cell in at and cell not in UNTRAINED):
        cache = f"{at[cell]['cache_bytes'] / 1024:.0f} KiB" if "cache_bytes" in at[cell] else "the text's tokens"
        figures = [f"{np.mean(saved(rows, cell, asked)):+.3f}" for asked in COLUMNS]
        over = gap.show(gap.shares(rows, cell, f"bigrams.{LENGTH}", "twin"))
        each, of_all = (closed_by_seed(rows, cell, asked) for asked in (f"bigrams.{LENGTH}", "text"))
        seeds = seeds_of(rows, cell)
        few = f", seed {', '.join(map(str, sorted(seeds)))} alone" if seeds < seeds_of(rows, BASE_CELL) else ""
        lines.append([named(cell) + few, f"{at[cell]['trained']:,}", cache, *figures, each, over, of_all])
    return lines


def seeds_of(rows: list[Row], cell: tuple[str, float]) -> set[int]:
    return {row["seed"] for row in rows if (row["model"], row["share"]) == cell}


def closed_by_seed(rows: list[Row], cell: tuple[str, float], asked: str) -> str:
    closed = gap.shares(rows, cell, asked, "twin")[1]
    return ", ".join(f"{one.mean:.2f}" if one else "no gap" for _, one in sorted(closed.items()))


def answers(rows: list[Row]) -> list[list[str]]:
    """What models answer of other kinds of questions."""
    lines = [["", *ANSWERS.values()]]
    for cell in (cell for cell in ANSWERING if seeds_of(rows, cell) == seeds_of(rows, BASE_CELL)):
        closed = [f" ({closed_by_seed(rows, cell, asked)})" * (cell != BASE_CELL) for asked in ANSWERS]
        figures = [gap.mean(rows, cell, asked) + each for asked, each in zip(ANSWERS, closed, strict=True)]
        lines.append(["the base" if cell == BASE_CELL else named(cell), *figures])
    return lines


def other_bases() -> str:
    """Of each other base that is measured, with its twin: what it is, and the table."""
    said = []
    for shape in SHAPES:
        rows = read_rows(shape)
        at = {(row["model"], row["share"]): row for row in rows}
        if ("twin", 0.0) not in at:
            continue
        numbers, sites = at[BASE_CELL]["trained"], [site for row in rows if "sites" in row for site in row["sites"]["2"]]
        places = ((site, len(Site.parse(site).heads)) for site in sites)
        heads = "; ".join(site if n <= 2 else f"{n} channels of {site.partition('.')[0]}" for site, n in places)
        seeds = sorted({row["seed"] for row in rows})
        words = f"**A {'Mamba-1' if shape == 'mamba1' else 'Mamba-2'} of {numbers:,} parameters**, seed{'s' * (len(seeds) > 1)}"
        words += f" {', '.join(map(str, seeds))}; heads {heads}. The base's own loss is {own_losses(rows)}."
        base = {row["seed"]: row["results"] for row in rows if row["model"] == "base"}
        changed = {(row["model"], row["share"]) for row in rows if row["results"] != base[row["seed"]]}
        same = [cell for cell in BRIEF[1:] if cell in at and cell not in changed]
        closed = f"\n\nClosed in tuning, so that every answer is the base's: {'; '.join(map(named, same))}." if same else ""
        said.append(f"{words}\n\n{table(savings(rows, BRIEF))}{closed}\n\n{table(answers(rows))}")
    return "\n\n".join(said) or "None is measured."


def rare_share(results: Row) -> float:
    """Which share of the tokens end a repeated rare bigram, from their mean loss, the other tokens' and all tokens'."""
    rare, others, every = (results[name]["mean"] for name in (f"bigrams.{LENGTH}", f"other_tokens.{LENGTH}", "text"))
    return (every - others) / (rare - others)


def own_losses(rows: list[Row]) -> str:
    return ", ".join(f"{gap.mean(rows, BASE_CELL, asked)} ({words})" for asked, words in COLUMNS.items())


def write_page(rows: list[Row]) -> str:
    """The page."""
    at = {(row["model"], row["share"]): row for row in rows}
    rivals = [cell for cell in list_cells() if cell[0] in RIVALS and cell in at]
    seeds = sorted({row["seed"] for row in rows})

    def gain(cell: tuple[str, float], asked: str = f"bigrams.{LENGTH}") -> float:
        return float(np.mean(saved(rows, cell, asked)))

    best = max(rivals, key=gain)
    verdict = f"The strongest rival is {named(best)}. On repeated rare bigrams it saves {gain(best):.3f} nats, the edit"
    verdict += f" {gain(MAIN):.3f}, and attention there from the first step on {gain(('twin', 0.0)):.3f}; on all tokens"
    verdict += f" {gain(best, 'text'):.3f}, {gain(MAIN, 'text'):.3f} and {gain(('twin', 0.0), 'text'):.3f}."
    recall = {name: sum(recalls(row) for row in rows if row["model"] == name) for name in ("base", "twin", "twin layer")}
    twins = sum(row["model"] in gap.TWINS for row in rows)
    verdict += f"\n{recall['twin'] + recall['twin layer']} of {twins} twins and {recall['base']} of {len(seeds)} bases recall:"
    verdict += " they lose less on repeated rare bigrams than on other tokens."
    seen = {kind: [row["tokens"][kind] for row in rows if row["model"] == "base"] for kind in SEEN}
    pairs, predictor = compare(rows)
    return PAGE.format(
        verdict=verdict,
        transfer=table(transfer(rows)),
        pairs=table(pairs),
        predictor=predictor,
        asked=at[BASE_CELL]["results"]["questions"]["n"],
        seeds=f"Seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}",
        numbers=at[BASE_CELL]["trained"],
        tokens=", ".join(f"{np.mean(each):,.0f} tokens {SEEN[kind]}" for kind, each in seen.items()),
        cells=f"{len(rows)} of {len(list_cells()) * len(seeds)}",
        missing="".join(f"; not {named(cell).strip('*')}" for cell in list_cells() if cell not in at),
        guessed=", ".join(f"{name} {share:.3f}" for name, share in at[BASE_CELL]["guesses"].items()),
        equal=gap.EQUAL,
        length=LENGTH,
        windows=at[BASE_CELL]["results"][f"bigrams.{LENGTH}"]["n"],
        own=own_losses(rows),
        rare=rare_share(at[BASE_CELL]["results"]),
        gap_of_all="" if gap.shares(rows, MAIN, "text", "twin")[0] else " On all tokens no gap is shown over these seeds.",
        closer=CLOSER_BY,
        table=table(savings(rows, list_cells())),
        others=other_bases(),
        minutes=sum(spent(row) for shape in (None, *SHAPES) for row in read_rows(shape)) / 60,
    )


def spent(row: dict[str, Any]) -> float:
    """Seconds of processor time; those of a training that went on in several processes are kept with its state."""
    return max(row["cpu_seconds"], row.get("seconds", 0))


def table(lines: list[list[str]]) -> str:
    """A table in Markdown, whose first line names the columns."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], ["---"] * len(lines[0]), *lines[1:]))


def transfer(rows: list[Row]) -> list[list[str]]:
    """What each model answers."""
    lines = [["", "heads, by seed", "steps", "nats saved on bigrams", *list(QUESTIONS)[1:], "nats saved on all tokens"]]
    cells = [("the base", BASE_CELL, ""), ("the twin (attention at the heads for bigrams)", ("twin", 0.0), "")]
    cells.append(("the n-gram cache", ("copy cache", 0.0), ""))
    cells.append(("the base, which reads the prompt twice", ("prompt twice", 0.0), ""))
    for kind, (cell, _) in QUESTIONS.items():
        cells += [(f"an edit for {kind}, untrained", (cell[0], 0.0), kind), (f"an edit for {kind}", cell, kind)]
    held = f"that for repeated bigrams, with hints and a KL weight of {CLOSER_BY:.0f}"
    cells.append((held, (HINTED, gap.EQUAL), "repeated bigrams"))
    for words, cell, kind in cells:
        own = [row for row in rows if (row["model"], row["share"]) == cell]
        if not own:
            continue
        heads = "; ".join(", ".join(row["located"][kind]) for row in rows if row["model"] == "base" and kind)
        steps = f"{np.mean([row['steps'] for row in own]):.0f}" if cell[1] else "-"
        figures = [gap.mean(rows, cell, asked) for asked in ANSWERS]
        figures[-1] += f" ({closed_by_seed(rows, cell, 'questions')})" * (cell != BASE_CELL)
        gained = [f"{np.mean(saved(rows, cell, asked)):+.3f}" for asked in (f"bigrams.{LENGTH}", "text")]
        lines.append([words, heads or "-", steps, gained[0], *figures, gained[1]])
    return lines


def share_gained(rows: list[Row], cell: tuple[str, float], kind: tuple[tuple[str, float], str]) -> list[Any]:
    """What a model gains on a kind of question as a share of what the edit for it gains, seed by seed, over questions. None
    where that is not shown to gain."""
    own, asked = kind
    base, model, best = (gap.values(rows, each, asked) for each in (BASE_CELL, cell, own))
    sign = -1 if asked.startswith("bigrams") else 1
    gains = {seed: sign * (best[seed].mean() - base[seed].mean()) > 0 for seed in sorted(base)}
    return [share_closed(base[seed], model[seed], best[seed]) if gains[seed] else None for seed in gains]


def compare(rows: list[Row]) -> tuple[list[list[str]], str]:
    """(of each pair of kinds, what an edit for one closes on the other, and how alike the heads are; whether the latter says
    the former)."""
    base = [row for row in rows if row["model"] == "base"]
    lines = [["an edit for", "on", "share, by seed", "heads in common, of 2, by seed", "slopes alike"]]
    closed, alike = np.full((len(QUESTIONS), len(QUESTIONS)), np.nan), np.eye(len(QUESTIONS))
    for (a, own), (b, other) in product(enumerate(QUESTIONS), repeat=2):
        gained = share_gained(rows, QUESTIONS[own][0], QUESTIONS[other])
        shown = [each.mean for each in gained if each]
        closed[a, b] = np.mean(shown) if shown else np.nan
        heads = [[{n for site in row["located"][k] for n in Site.parse(site).head_names} for k in (own, other)] for row in base]
        slopes = [[[row["slopes"][k][name] for name in sorted(row["slopes"][k])] for k in (own, other)] for row in base]
        alike[a, b] = np.mean([spearmanr(*pair).statistic for pair in slopes])
        shares = ", ".join(f"{each.mean:.2f} [{each.low:.2f}, {each.high:.2f}]" if each else "no gain" for each in gained)
        lines.append([own, other, shares, ", ".join(str(len(x & y)) for x, y in heads), f"{alike[a, b]:.2f}"])
    known = ~np.isnan(closed) & ~np.eye(len(QUESTIONS), dtype=bool)
    if known.sum() < FEWEST:
        return lines, f"Of {known.sum()} pairs a share is known, too few to say whether it goes with the likeness of slopes."
    orders = [list(order) for order in permutations(range(len(QUESTIONS)))]
    found = [float(spearmanr(closed[known], alike[np.ix_(order, order)][known]).statistic) for order in orders]
    as_much = sum(each >= found[0] - 1e-9 for each in found)  # the first order is the one that was measured
    said = f"Rank correlation of the share with how alike the slopes are, over {known.sum()} pairs of kinds (means over"
    said += f"\nseeds): {found[0]:.2f}. {as_much} of the {len(orders)} permutations of kinds correlate as strongly"
    return lines, f"{said} (Mantel's test)."


def draw(rows: list[Row], path: Path) -> None:
    """Nats saved on repeated rare bigrams and on all tokens: every seed a point."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    known = {(row["model"], row["share"]) for row in rows}
    cells = [cell for cell in list_cells()[:0:-1] if cell in known - {*UNTRAINED} and cell[1] in (0.0, gap.EQUAL, LONG)]
    figure, panels = plt.subplots(1, 2, figsize=(11, 6.4), sharey=True, layout="constrained")
    for axes, asked, title in zip(panels, (f"bigrams.{LENGTH}", "text"), ("repeated rare bigrams", "all tokens"), strict=True):
        for place, cell in enumerate(cells):
            color = "#111827" if cell[0] in ("twin", "twin layer") else "#0072b2" if cell[0] not in RIVALS else "#d55e00"
            found = saved(rows, cell, asked)
            axes.plot(found, [place] * len(found), "o", color=color, alpha=0.5, markersize=5)
            axes.plot(np.mean(found), place, "|", color=color, markersize=14, markeredgewidth=2)
        axes.axvline(0, color="#6b7280", linewidth=0.8)
        axes.set(xlabel="nats saved", title=title)
    panels[0].set_yticks(range(len(cells)), [textwrap.fill(named(cell).strip("*"), 80) for cell in cells], fontsize=7.5)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Write the page."""
    rows = of_all_seeds(read_rows())
    draw(rows, gap.HERE / "prose.png")
    write_text(gap.HERE / "prose.md", write_page(rows))
