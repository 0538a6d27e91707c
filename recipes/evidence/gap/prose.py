"""How much of the gap on prose does a brief edit close?

    python recipes/evidence/gap/prose.py BOOKS --seeds 1 2 3    measure what prose.jsonl does not hold yet
    python recipes/evidence/gap/prose.py --page                 prose.md and prose.png, from prose.jsonl

BOOKS is a folder with train/ and valid/ of public-domain novels. The base, its twins, the edits and the rivals are those of
gap.py, at a million parameters and with the tokenizer of checkpoints/tiny-names. Pretraining sees windows of train/ in which
rare tokens have exchanged names, so that they can only be recalled, and some of which repeat a passage of their own; windows
are short at first, without which none of these models learns to recall in so few tokens. Heads are located on repeated rare
bigrams of four novels of valid/, and models are measured on the others, by authors of whom nothing was learnt: the loss on
repeated rare bigrams, on the other tokens and on all, at the length of pretraining, twice and four times that.
"""

import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gap
import numpy as np
import torch
from transformers import AutoTokenizer

import surgery
from surgery.evaluation.controls import fit_copy_cache
from surgery.records.recipe import Hints
from surgery.runtime.files import read_text, write_text
from surgery.runtime.progress import say
from surgery.splicing.splice import adopt
from surgery.tuning.losses import IGNORE, Part
from surgery.tuning.text import open_text, text_rows

RECORD, WORK = gap.HERE / "prose.jsonl", gap.WORK / "prose"
TOKENIZER = gap.ROOT / "checkpoints" / "tiny-names"
LENGTH, TOKENS = 512, 4096  # of a window, and of a step of pretraining
SHORT, FIRST = 128, 600  # tokens of a window in the first steps, and how many these are
RARE = 75e-6  # how often a token occurs, at most, that is given another name in each window
REPEATS = {SHORT: 0.5, LENGTH: 0.25}  # the share of windows that repeat a passage, of a sixteenth to a half of their length
AUTHORS = ("Oscar Wilde", "Jane Austen", "George Eliot", "Charles Dickens")  # of valid/, on whom heads are located
COUNTED = "Charles Dickens - Bleak House.txt"  # of train/, in which locating counts bigrams
BASE = {
    "architecture": {"model_type": "mamba2", "hidden_size": 128, "num_hidden_layers": 4, "num_heads": 16, "head_dim": 16}
    | {"state_size": 16, "n_groups": 1, "chunk_size": 64, "tie_word_embeddings": True},
    **{"steps": 1100, "learning_rate": 4e-3, "weight_decay": 0.1, "embedding_std": 0.06},
}
TUNE = {"examples": (), "bigram_weight": 1.0, "kl_weight": 10.0, "text_batch_size": 4, "text_tokens": LENGTH}
TUNED = 12  # edits are tuned on one in so many novels of train/
LENGTHS = (LENGTH, 2 * LENGTH, 4 * LENGTH)
LONG = 0.1  # of the pretraining tokens
SHARES = (0.0, 0.003, 0.01, gap.EQUAL, LONG)
EDITS = ("4 heads", "no null key")
RIVALS = ("copy cache", "more training", "all weights", "same layer", "adapters", "initial state", "other layer", "whole layer")
Row = dict[str, Any]


def list_cells() -> list[tuple[str, float]]:
    """(model, share of the pretraining tokens) of a seed, in the order in which they are measured."""
    cells = [("base", 0.0), ("twin layer", 0.0), ("twin", 0.0), *(("2 heads", share) for share in SHARES)]
    cells += [(name, gap.EQUAL) for name in EDITS] + [("hints", share) for share in (gap.EQUAL, LONG)]
    return cells + [(name, 0.0 if name == "copy cache" else gap.EQUAL) for name in RIVALS]


def take_books(books: Path) -> None:
    """What gap.py trains from now on, on what, and where it keeps it."""
    held = WORK / "held-out"
    held.mkdir(parents=True, exist_ok=True)
    for file in sorted((books / "valid").glob("*.txt")):
        if not file.name.startswith(AUTHORS):
            write_text(held / file.name, read_text(file))
    gap.BASE, gap.WORK, gap.KINDS = BASE, WORK, ("text",)
    gap.TUNE = surgery.Tune(**TUNE)
    tuned = tuple(str(file) for file in sorted((books / "train").glob("*.txt"))[::TUNED])
    gap.DATA = surgery.Data(skills=(), train_text=tuned, held_out_text=str(held))
    located = [str(file) for file in sorted((books / "valid").glob("*.txt")) if file.name.startswith(AUTHORS)]
    options = {"source": located, "elsewhere": str(books / "train" / COUNTED), "tokens": LENGTH}
    gap.LOCATE = surgery.Locate(probe="bigrams", roles=0, options=options)
    gap.BENCH = surgery.Bench(suites=("bigrams", "text"), contexts=LENGTHS, windows=128, window=LENGTH)


def read_corpus(books: Path, tokenizer: Any) -> np.ndarray:
    """The token ids of train/, (tokens,)."""
    kept = WORK / "train.npy"
    if not kept.exists():
        say("tokenising the novels of train/")
        texts = [read_text(file) for file in sorted((books / "train").glob("*.txt"))]
        ids = np.concatenate([tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts])
        np.save(kept, ids.astype(np.uint16))
    return np.load(kept)


class ProseTraining(gap.train.Training):
    """A pretraining whose steps see windows of novels."""

    def __init__(self, recipe: Any, tokenizer: Any, work: Path, corpus: np.ndarray):
        super().__init__(recipe, tokenizer, work)
        self.at["over"] = True  # there is no retrieval alone before
        self.corpus = corpus
        shares = np.bincount(corpus, minlength=len(tokenizer)) / len(corpus)
        self.rare = np.flatnonzero(shares <= RARE)

    def losses(self, parts: dict[str, Part]) -> dict[str, Any]:
        """In bfloat16; parameters stay in float32."""
        with torch.autocast("cpu", torch.bfloat16):  # it ends with every step, since it keeps the weights that it has converted
            return super().losses(parts)

    def parts(self) -> dict[str, Part]:
        length = SHORT if self.at["all"] < FIRST else LENGTH
        ids = torch.from_numpy(np.stack([self.window(length) for _ in range(TOKENS // length)]))
        targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORE)
        return {"text": Part("text", ids, targets)}

    def window(self, length: int) -> np.ndarray:
        """One row of a step, (length,)."""
        start = self.rng.randrange(len(self.corpus) - length)
        names = np.arange(len(self.tokenizer))
        names[self.rare] = np.random.default_rng(self.rng.getrandbits(32)).permutation(self.rare)
        ids = names[self.corpus[start : start + length]]
        passage = self.rng.randint(length // 16, length // 2)
        return np.resize(ids[:passage], length) if self.rng.random() < REPEATS[length] else ids

    def glance(self) -> str:
        return f"loss {self.at['running']:.3f}"


class Prose(gap.Seed):
    """One seed: its base, and what is made of it."""

    def __init__(self, seed: int, books: Path):
        super().__init__(seed)
        self.tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        self.corpus = read_corpus(books, self.tokenizer)

    def open_training(self, recipe: Any, name: str) -> Any:
        return ProseTraining(recipe, self.tokenizer, WORK / f"{self.seed}-{name}", self.corpus)

    def begin(self, name: str) -> tuple[Any, Any, surgery.Tune, int]:
        if name != "hints":
            return super().begin(name)
        model, teacher, tuning, trained = super().begin("no null key")
        return model, teacher, tuning.model_copy(update={"kl_weight": 1.0, "hints": Hints()}), trained

    def measure(self, name: str, share: float) -> dict[str, Any]:
        if name != "copy cache":
            return super().measure(name, share)
        started = time.process_time()
        rows, _ = text_rows(open_text(gap.DATA.train_text), self.tokenizer, LENGTH, range(32), self.seed)
        base = adopt(self.base)
        with torch.inference_mode():
            cache = fit_copy_cache(base, rows, gap.BENCH.batch_size)
        results = {each.name: gap.pack(each.ask(cache), each.metric) for each in self.asked()}
        spent = round(time.process_time() - started, 1)
        row = {"seed": self.seed, "model": name, "share": share, "steps": 0, "tokens": {}, "trained": 0, "results": results}
        return {**row, "shares": {str(order): each for order, each in cache.shares.items()}, "cpu_seconds": spent}


# What the page says

WORDS = gap.RIVALS | gap.EDITS | {name: f"**the twin: {words}**" for name, words in gap.TWINS.items()}
WORDS |= {"2 heads": "two located heads", "hints": "the same with hints, and a tenth of the KL weight"}
WORDS |= {"copy cache": "an untrained n-gram cache of the text", "other layer": "two random heads of other layers"}
COLUMNS = {f"bigrams.{LENGTH}": "bigrams", f"bigrams.{LENGTHS[-1]}": f"bigrams, {LENGTHS[-1]:,} tokens"}
COLUMNS |= {f"other_tokens.{LENGTH}": "other tokens", "text": "all tokens"}
MAIN, BASE_CELL = ("2 heads", gap.EQUAL), ("base", 0.0)
PAGE = """# The gap on prose

{verdict}

{seeds}. A base is a Mamba-2 of {numbers:,} parameters and has seen {tokens:,} tokens of novels; its twins have seen the same
in the same order. Rare tokens had exchanged names in each window, and some windows repeated a passage of their own. The edit is
attention at two located heads with null keys, tuned for {equal:.0%} of these tokens on the repeated rare bigrams of other
novels, and held to the base on all other tokens; its rivals are tuned alike. What counts is the loss on novels by authors of
whom nothing was learnt, with their own names: {windows} rows of {length} tokens. A repeated rare bigram is a pair of tokens
that stood in the row before and is rare elsewhere. Nats saved against the base, means over seeds; the base's own loss is {own}.

{table}

Share closed: (edited - base) / (twin - base), on repeated rare bigrams, with the twin that has attention at the same heads.

![Nats saved, every seed a point](prose.png)

{minutes:.0f} minutes of processor time. `prose.py` measures, and writes this page; `prose.jsonl` is the record.
"""


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
    if name in ("2 heads", "hints"):
        words += f", {share:.1%} of the tokens" if share else ", untrained"
    return words


def write_page(rows: list[Row]) -> str:
    """The page, from the seeds whose cells are all measured."""
    at = {(row["model"], row["share"]): row for row in rows}
    head = ["nats saved", "parameters trained", "cache, 2,048 tokens", *COLUMNS.values(), "share closed"]
    lines = [head, ["---"] * len(head)]
    for cell in list_cells()[1:]:
        cache = f"{at[cell]['cache_bytes'] / 1024:.0f} KiB" if "cache_bytes" in at[cell] else "the text's tokens"
        figures = [f"{np.mean(saved(rows, cell, asked)):+.3f}" for asked in COLUMNS]
        closed = gap.show(gap.shares(rows, cell, f"bigrams.{LENGTH}", "twin"))
        lines.append([named(cell), f"{at[cell]['trained']:,}", cache, *figures, closed])
    rivals = [cell for cell in list_cells() if cell[0] in RIVALS]
    seeds = sorted({row["seed"] for row in rows})

    def gain(cell: tuple[str, float], asked: str = f"bigrams.{LENGTH}") -> float:
        return float(np.mean(saved(rows, cell, asked)))

    best = max(rivals, key=gain)
    verdict = f"The strongest rival is {named(best)}. On repeated rare bigrams it saves {gain(best):.3f} nats, the edit"
    verdict += f" {gain(MAIN):.3f}, and attention there from the first step on {gain(('twin', 0.0)):.3f}; on all tokens"
    verdict += f" {gain(best, 'text'):.3f}, {gain(MAIN, 'text'):.3f} and {gain(('twin', 0.0), 'text'):.3f}."
    recall = {name: sum(recalls(row) for row in rows if row["model"] == name) for name in ("base", "twin", "twin layer")}
    verdict += f"\n{recall['base']} of {len(seeds)} bases lose less on repeated rare bigrams than on other tokens, and so"
    verdict += f" recall; {recall['twin'] + recall['twin layer']} of {2 * len(seeds)} twins do."
    return PAGE.format(
        verdict=verdict,
        seeds=f"Seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}",
        numbers=at[BASE_CELL]["trained"],
        tokens=sum(at[BASE_CELL]["tokens"].values()),
        equal=gap.EQUAL,
        length=LENGTH,
        windows=at[BASE_CELL]["results"][f"bigrams.{LENGTH}"]["n"],
        own=", ".join(f"{gap.mean(rows, BASE_CELL, asked)} ({words})" for asked, words in COLUMNS.items()),
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
        minutes=sum(row["cpu_seconds"] for row in rows) / 60,
    )


def draw(rows: list[Row], path: Path) -> None:
    """Nats saved on repeated rare bigrams and on all tokens: every seed a point."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = [cell for cell in list_cells()[:0:-1] if cell[1] in (0.0, gap.EQUAL, LONG)]
    figure, panels = plt.subplots(1, 2, figsize=(10, 5.2), sharey=True, layout="constrained")
    for axes, asked, title in zip(panels, (f"bigrams.{LENGTH}", "text"), ("repeated rare bigrams", "all tokens"), strict=True):
        for place, cell in enumerate(cells):
            color = "#111827" if cell[0] in ("twin", "twin layer") else "#0072b2" if cell[0] not in RIVALS else "#d55e00"
            found = saved(rows, cell, asked)
            axes.plot(found, [place] * len(found), "o", color=color, alpha=0.5, markersize=5)
            axes.plot(np.mean(found), place, "|", color=color, markersize=14, markeredgewidth=2)
        axes.axvline(0, color="#6b7280", linewidth=0.8)
        axes.set(xlabel="nats saved", title=title)
    panels[0].set_yticks(range(len(cells)), [textwrap.fill(named(cell).strip("*"), 64) for cell in cells], fontsize=7.5)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, and write the page."""
    books = {"type": Path, "nargs": "?", "help": "a folder with train/ and valid/"}
    given = gap.parse_arguments(__doc__, "write prose.md and prose.png from prose.jsonl", books=books)
    if given.seeds:
        take_books(given.books)
        gap.measure_all(given.seeds, RECORD, list_cells(), lambda seed: Prose(seed, given.books))
    if given.page:
        rows = gap.read_rows(RECORD)
        counts = Counter(row["seed"] for row in rows)
        rows = [row for row in rows if counts[row["seed"]] == len(list_cells())]
        draw(rows, gap.HERE / "prose.png")
        write_text(gap.HERE / "prose.md", write_page(rows))


if __name__ == "__main__":
    main()
