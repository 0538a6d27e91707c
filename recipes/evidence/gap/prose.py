"""How much of the gap on prose does a brief edit close?

    python recipes/evidence/gap/prose.py BOOKS --seeds 1 2 3    measure what prose.jsonl does not hold yet
    python recipes/evidence/gap/prose.py --page                 prose.md and prose.png, from prose.jsonl

BOOKS is a folder with train/ and valid/ of public-domain novels. The base, its twins, the edits and the rivals are those of
gap.py, at a million parameters and with the tokenizer of checkpoints/tiny-names. Pretraining sees windows of train/ in which
rare tokens have exchanged names, so that they can only be recalled, and some of which repeat a passage of their own; windows
and passages are short at first, without which none of these models learns to recall in so few tokens. It sees dictionaries and
joint recall as well, so that a base has several forms of retrieval. Heads are located on repeated rare bigrams of four novels
of valid/, and models are measured on the others, by authors of whom nothing was learnt: the loss on repeated rare bigrams, on
the other tokens and on all, at the length of pretraining, twice and four times that. Other edits are located and tuned on
dictionaries, joint recall and questions about running text (running_text.py), and all are asked everything. Another curriculum
needs an empty runs/gap/prose: a training goes on from what is there.
"""

import json
import textwrap
import time
from collections import Counter
from functools import cache
from itertools import permutations, product
from pathlib import Path
from typing import Any

import gap
import numpy as np
import torch
from running_text import guesses, make_questions, write_questions
from scipy.stats import spearmanr
from transformers import AutoTokenizer

import surgery
from surgery.evaluation.controls import fit_copy_cache
from surgery.evaluation.statistics import share_closed
from surgery.evaluation.suites import Given, Measurement, ask_probe
from surgery.records.plan import Plan
from surgery.records.recipe import Examples, Hints
from surgery.records.site import Site
from surgery.runtime.files import read_text, write_text
from surgery.runtime.progress import say
from surgery.splicing.splice import adopt
from surgery.tuning.examples import QUERIES, dictionary_example, encode_examples
from surgery.tuning.losses import IGNORE, Part
from surgery.tuning.text import open_text, text_rows

RECORD, WORK = gap.HERE / "prose.jsonl", gap.WORK / "prose"
TOKENIZER = gap.ROOT / "checkpoints" / "tiny-names"
LENGTH, TOKENS = 512, 4096  # of a window, and of the windows of a step of pretraining
SHORT, FIRST = 64, 700  # tokens of a window in the first steps, and how many these are
GROWN = 500  # steps over which passages that are repeated grow from 8 tokens to half a short window
COUNTS = {"tune": 2000, "bench": 300}  # questions about running text: of novels of train/ (a quarter is used), of valid/
RARE = 75e-6  # how often a token occurs, at most, that is given another name in each window
REPEATS = 0.25  # the share of long windows that repeat a passage; of short ones all at first, and half in the end
PAIRS, TARGETS = (2, 32), 48  # of a dictionary in the first step and from the last short window on; questions a step, about
AUTHORS = ("Oscar Wilde", "Jane Austen", "George Eliot", "Charles Dickens")  # of valid/, on whom heads are located
COUNTED = "Charles Dickens - Bleak House.txt"  # of train/, in which locating counts bigrams
BASE = {
    "architecture": {"model_type": "mamba2", "hidden_size": 128, "num_hidden_layers": 4, "num_heads": 8, "head_dim": 32}
    | {"state_size": 64, "n_groups": 1, "chunk_size": 64, "tie_word_embeddings": True},
    **{"steps": 1600, "learning_rate": 4e-3, "weight_decay": 0.1, "embedding_std": 0.06},
}
TUNE = {"batch_size": 8, "text_batch_size": 4, "text_tokens": LENGTH}
WIDTH = 64  # of queries and keys, at least the state's size
TUNED = 12  # edits are tuned on one in so many novels of train/
LENGTHS = (LENGTH, 2 * LENGTH, 4 * LENGTH)
LONG = 0.1  # of the pretraining tokens
SHARES = (0.0, 0.003, 0.01, LONG)
EDITS = ("4 heads", "no null key")
OTHERS = ("dictionaries", "joint recall", "questions")  # on which edits are located and tuned, beside repeated bigrams
UNTRAINED = tuple((name, 0.0) for name in OTHERS)  # which only the page's second table shows
READS, CLOSER = "null keys that read", "held closer"
CLOSER_BY = 4.0  # the KL weight of CLOSER, as recipes that `surgery run` makes have it
RIVALS = ("copy cache", *gap.RIVALS)
SOONER = ("copy cache", "same layer", "adapters", READS, "window", "all weights")
Row = dict[str, Any]


def list_cells() -> list[tuple[str, float]]:
    """(model, share of the pretraining tokens) of a seed, in the order in which they are measured."""
    cells = [("base", 0.0), ("twin", 0.0), ("2 heads", 0.0), *((name, gap.EQUAL) for name in ("2 heads", *OTHERS))]
    cells += [
        (name, 0.0 if name in ("prompt twice", "copy cache") else gap.EQUAL) for name in dict.fromkeys((*SOONER, *RIVALS))
    ]
    cells += [(CLOSER, gap.EQUAL), *UNTRAINED, *(("2 heads", share) for share in SHARES[1:-1])]
    cells += [(name, gap.EQUAL) for name in (*EDITS, "hints")]
    return [*cells, ("2 heads", SHARES[-1]), ("hints", SHARES[-1]), ("twin layer", 0.0)]


def take_books(books: Path) -> None:
    """What gap.py trains from now on, on what, and where it keeps it."""
    held = WORK / "held-out"
    held.mkdir(parents=True, exist_ok=True)
    for file in sorted((books / "valid").glob("*.txt")):
        if not file.name.startswith(AUTHORS):
            write_text(held / file.name, read_text(file))
    gap.BASE, gap.WORK, gap.WIDTH = BASE, WORK, WIDTH
    gap.PLAN = gap.PLAN.model_copy(update={"width": WIDTH})
    tuned = tuple(str(file) for file in sorted((books / "train").glob("*.txt"))[::TUNED])
    gap.DATA = surgery.Data(skills=("knowledge",), facts="capitals", train_text=tuned, held_out_text=str(held))
    others = [file for file in sorted((books / "train").glob("*.txt")) if str(file) not in tuned]
    for part, novels in (("tune", others), ("bench", sorted((books / "valid").glob("*.txt")))):
        write_questions(WORK / f"{part}.jsonl", make_questions(novels, COUNTS[part]))
    gap.BENCH = surgery.Bench(
        suites=("bigrams", "text", "kv"),
        contexts=LENGTHS,
        windows=128,
        window=LENGTH,
        pairs=(16, 32),
        unseen_pairs=(),
        limit=COUNTS["bench"],
    )


def find_recipe(kind: str, books: Path) -> tuple[surgery.Locate, surgery.Tune, tuple[str, ...]]:
    """By what questions heads are located, on what an edit is tuned, and which kinds of rows a step sees."""
    if kind == "repeated bigrams":
        located = [str(file) for file in sorted((books / "valid").glob("*.txt")) if file.name.startswith(AUTHORS)]
        options: Row = {"source": located, "elsewhere": str(books / "train" / COUNTED), "tokens": LENGTH}
        tuning = surgery.Tune(**TUNE, examples=(), bigram_weight=1.0)
        return surgery.Locate(probe="bigrams", roles=0, options=options), tuning, ("text",)
    probe = "knowledge" if kind == "questions" else "kv"
    options = {"source": str(WORK / "tune.jsonl")} if kind == "questions" else {"pairs": 16, "joint": kind == "joint recall"}
    taught = options if kind == "questions" else options | {"pairs": (8, 32)}
    tuning = surgery.Tune(**TUNE, examples=(Examples(probe=probe, options=taught),))
    return surgery.Locate(probe=probe, roles=0, options=options), tuning, (kind, "text")


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
        step = self.at["all"]
        length = SHORT if step < FIRST else LENGTH
        done = min(1.0, step / FIRST)
        share = 1 - done / 2 if length == SHORT else REPEATS
        most = 8 + int((SHORT // 2 - 8) * min(1.0, step / GROWN) ** 2) if length == SHORT else LENGTH // 2
        ids = torch.from_numpy(np.stack([self.window(length, share, most) for _ in range(TOKENS // length)]))
        parts = {"text": Part("text", ids, torch.nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORE))}
        largest = PAIRS[0] + int((PAIRS[1] - PAIRS[0]) * done**2)
        for kind in ("kv", "joint"):
            pairs = self.rng.randint(max(PAIRS[0], largest // 4), largest)
            count = max(1, TARGETS // pairs)
            parts[kind] = encode_examples(
                self.tokenizer,
                [dictionary_example(self.rng, pairs, QUERIES, "all", joint=kind == "joint") for _ in range(count)],
            )
        return parts

    def window(self, length: int, share: float, most: int) -> np.ndarray:
        """One row of a step, (length,). share: of rows that repeat a passage, of at most so many tokens."""
        start = self.rng.randrange(len(self.corpus) - length)
        names = np.arange(len(self.tokenizer))
        names[self.rare] = np.random.default_rng(self.rng.getrandbits(32)).permutation(self.rare)
        ids = names[self.corpus[start : start + length]]
        passage = self.rng.randint(8, most)
        return np.resize(ids[:passage], length) if self.rng.random() < share else ids

    def glance(self) -> str:
        return f"loss {self.at['running']:.3f}"


class Prose(gap.Seed):
    """One seed: its base, and what is made of it."""

    def __init__(self, seed: int, books: Path, kind: str = "repeated bigrams"):
        super().__init__(seed)
        self.books, self.tokenizer = books, AutoTokenizer.from_pretrained(TOKENIZER)
        self.corpus = read_corpus(books, self.tokenizer)
        self.kind = kind
        self.locating, self.tuning, self.kinds = find_recipe(kind, books)

    @cache  # noqa: B019
    def other(self, kind: str) -> "Prose":
        """The same base, of which heads are located and tuned on another kind of question."""
        other = Prose(self.seed, self.books, kind)
        other.training = self.training  # type: ignore[method-assign]
        return other

    @cache  # noqa: B019
    def plan(self, heads: int) -> Plan:
        """For READS with null keys that read the query, as plan.keep_skills fits them: open at the answers to other such
        questions, closed on text and on facts."""
        plan = super().plan(heads)
        return self.plan_at(plan.sites, self.questions(self.seed + 1), keep_skills=True) if self.kind == READS else plan

    def make(self, name: str, share: float) -> tuple[Any, Row]:
        return self.other(name).make("2 heads", share) if name in (*OTHERS, READS) else super().make(name, share)

    @cache  # noqa: B019
    def asked(self) -> list[Measurement]:
        given = Given(self.tokenizer, gap.BENCH, gap.DATA, self.seed)
        joint = ask_probe(given, "joint.16", "joint recall, 16 pairs", "joint, 16", "kv", pairs=16, keys="seen", joint=True)
        source = str(WORK / "bench.jsonl")
        return [*super().asked(), joint, ask_probe(given, "questions", "questions", "questions", "knowledge", source=source)]

    def open_training(self, recipe: Any, name: str) -> Any:
        return ProseTraining(recipe, self.tokenizer, WORK / f"{self.seed}-{name}", self.corpus)

    def begin(self, name: str) -> tuple[Any, Any, surgery.Tune, int]:
        variants: dict[str, tuple[str, Row]] = {
            "hints": ("no null key", {"hints": Hints()}),
            CLOSER: ("2 heads", {"kl_weight": CLOSER_BY}),
        }
        made, changed = variants.get(name, (name, {}))
        model, teacher, tuning, trained = super().begin(made)
        return model, teacher, tuning.model_copy(update=changed), trained

    def measure(self, name: str, share: float) -> dict[str, Any]:
        if name != "copy cache":
            row = super().measure(name, share)
            row["asked"] = {each.name: each.digest[:12] for each in self.asked()}
            if name == "base":
                kinds = {"repeated bigrams": self} | {kind: self.other(kind) for kind in OTHERS}
                row["slopes"] = {k: {h.name: round(h.slope, 5) for h in each.ranking().heads} for k, each in kinds.items()}
                lines = [json.loads(line) for line in read_text(WORK / "bench.jsonl").splitlines()]
                row["guesses"] = guesses(lines)
                row["located"] = {kind: [str(site) for site in each.plan(2).sites] for kind, each in kinds.items()}
            return row
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
WORDS |= {"2 heads": "two located heads", "hints": "the same with hints"}
WORDS |= {kind: f"two heads, located by {kind} and tuned on them" for kind in OTHERS}
WORDS[CLOSER] = f"two located heads, held to the base with a KL weight of {CLOSER_BY:.0f}, not 1"
WORDS[READS] = "the same as for dictionaries, with null keys that read the query"
WORDS |= {"copy cache": "an untrained n-gram cache of the text", "other layer": "two random heads of other layers"}
COLUMNS = {f"bigrams.{LENGTH}": "bigrams", f"bigrams.{LENGTHS[-1]}": f"bigrams, {LENGTHS[-1]:,} tokens"}
COLUMNS |= {f"other_tokens.{LENGTH}": "other tokens", "text": "all tokens"}
QUESTIONS = {  # what an edit is located and tuned on -> (its cell, what it is asked)
    "repeated bigrams": (("2 heads", gap.EQUAL), f"bigrams.{LENGTH}"),
    "dictionaries": (("dictionaries", gap.EQUAL), "kv.32"),
    "joint recall": (("joint recall", gap.EQUAL), "joint.16"),
    "questions": (("questions", gap.EQUAL), "questions"),
}
FEWEST = 6  # pairs of kinds, of which a correlation is printed
SEEN = {"text": "of novels", "kv": "in dictionaries", "joint": "in joint recall"}
MAIN, BASE_CELL = ("2 heads", gap.EQUAL), ("base", 0.0)
PAGE = """# The gap on prose

{verdict}

{seeds}; {cells} models are measured. A base is a Mamba-2 of {numbers:,} parameters and has seen {tokens}; its twins have seen
the same in the same order. In novels, rare tokens had exchanged names in each window, and some windows repeated a passage of
their own. The edit is attention at two located heads with null keys, tuned for {equal:.0%} of all these tokens on the repeated
rare bigrams of other novels, and held to the base on all other tokens; its rivals are tuned alike. What counts is the loss on
novels by authors of whom nothing was learnt, with their own names: {windows} rows of {length} tokens. A repeated rare bigram is
a pair of tokens that stood in the row before and is rare elsewhere. Nats saved against the base, means over seeds; the base's
own loss is {own}.

{table}

Share closed: (edited - base) / (twin - base), on repeated rare bigrams, with the twin that has attention at the same heads;
over all seeds with Fieller's interval, which is wide where seeds differ.
Rivals are tuned as the edit is, for as many tokens; the window takes the bytes of the edit's cache of a tuning row.

![Nats saved, every seed a point](prose.png)

## What tuning on one kind of question does for another

Each edit is two heads, located by one kind of question and tuned on rows of it and of text with {equal:.0%} of the tokens.
Dictionaries have 32 pairs; the 16 keys of joint recall are of two words, each of which is in four. The {asked} questions
are about running text (who, where, which number): they repeat a sentence of a passage up to the answer (`running_text.py`),
of novels from which no model has learnt; without the question, these rules answer {guessed}. Means over seeds.

{transfer}

What an edit for one kind gains on each, as a share of what the edit for that kind gains there (with its interval over
questions); the heads that both have; and how alike the slopes are by which all heads were ranked (Spearman, mean over seeds):

{pairs}

{predictor}

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
    if name in ("2 heads", "hints", *OTHERS):
        words += f", {share:.1%} of the tokens" if share else ", untrained"
    return words


def write_page(rows: list[Row]) -> str:
    """The page."""
    at = {(row["model"], row["share"]): row for row in rows}
    head = ["nats saved", "parameters trained", "cache, 2,048 tokens"]
    lines = [[*head, *COLUMNS.values(), "share closed, by seed", "over all seeds"]]
    for cell in (cell for cell in list_cells()[1:] if cell in at and cell not in UNTRAINED):
        cache = f"{at[cell]['cache_bytes'] / 1024:.0f} KiB" if "cache_bytes" in at[cell] else "the text's tokens"
        figures = [f"{np.mean(saved(rows, cell, asked)):+.3f}" for asked in COLUMNS]
        over, alone = gap.shares(rows, cell, f"bigrams.{LENGTH}", "twin")
        each = ", ".join(f"{one.mean:.2f}" if one else "no gap shown" for one in alone.values())
        lines.append([named(cell), f"{at[cell]['trained']:,}", cache, *figures, each, gap.show((over, alone))])
    rivals = [cell for cell in list_cells() if cell[0] in RIVALS and cell in at]
    seeds = sorted({row["seed"] for row in rows})

    def gain(cell: tuple[str, float], asked: str = f"bigrams.{LENGTH}") -> float:
        return float(np.mean(saved(rows, cell, asked)))

    best = max(rivals, key=gain)
    verdict = f"The strongest rival is {named(best)}. On repeated rare bigrams it saves {gain(best):.3f} nats, the edit"
    verdict += f" {gain(MAIN):.3f}, and attention there from the first step on {gain(('twin', 0.0)):.3f}; on all tokens"
    verdict += f" {gain(best, 'text'):.3f}, {gain(MAIN, 'text'):.3f} and {gain(('twin', 0.0), 'text'):.3f}."
    recall = {name: sum(recalls(row) for row in rows if row["model"] == name) for name in ("base", "twin", "twin layer")}
    verdict += f"\n{recall['base']} of {len(seeds)} bases lose less on repeated rare bigrams than on other tokens, and so"
    twins = sum(row["model"] in gap.TWINS for row in rows)
    verdict += f" recall; {recall['twin'] + recall['twin layer']} of {twins} twins do."
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
        guessed=", ".join(f"{name} {share:.3f}" for name, share in at[BASE_CELL]["guesses"].items()),
        equal=gap.EQUAL,
        length=LENGTH,
        windows=at[BASE_CELL]["results"][f"bigrams.{LENGTH}"]["n"],
        own=", ".join(f"{gap.mean(rows, BASE_CELL, asked)} ({words})" for asked, words in COLUMNS.items()),
        table=table(lines),
        minutes=sum(row["cpu_seconds"] for row in rows) / 60,
    )


def table(lines: list[list[str]]) -> str:
    """A table in Markdown, whose first line names the columns."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], ["---"] * len(lines[0]), *lines[1:]))


def transfer(rows: list[Row]) -> list[list[str]]:
    """What each model answers."""
    lines = [["", "heads, by seed", "steps", "nats saved on bigrams", *list(QUESTIONS)[1:], "nats saved on all tokens"]]
    cells = [("the base", BASE_CELL, ""), ("the twin", ("twin", 0.0), ""), ("the n-gram cache", ("copy cache", 0.0), "")]
    cells += [("the base, which reads the prompt twice", ("prompt twice", 0.0), "")]
    for kind, (cell, _) in QUESTIONS.items():
        cells += [(f"an edit for {kind}, untrained", (cell[0], 0.0), kind), (f"an edit for {kind}", cell, kind)]
    cells += [("that for dictionaries, with null keys that read the query", (READS, gap.EQUAL), "dictionaries")]
    for words, cell, kind in cells:
        own = [row for row in rows if (row["model"], row["share"]) == cell]
        if not own:
            continue
        heads = "; ".join(", ".join(row["located"][kind]) for row in rows if row["model"] == "base" and kind)
        steps = f"{np.mean([row['steps'] for row in own]):.0f}" if cell[1] else "-"
        figures = [gap.mean(rows, cell, asked) for _, asked in list(QUESTIONS.values())[1:]]
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
    said += f"\nseeds): {found[0]:.2f}. Of the {len(orders)} ways to exchange the kinds {as_much} give as much (Mantel's test)."
    return lines, said


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
    """Measure, and write the page."""
    books = {"type": Path, "nargs": "?", "help": "a folder with train/ and valid/"}
    given = gap.parse_arguments(__doc__, "write prose.md and prose.png from prose.jsonl", books=books)
    if given.seeds:
        take_books(given.books)
        gap.measure_all(given.seeds, RECORD, list_cells(), lambda seed: Prose(seed, given.books))
    if given.page:
        rows = sorted(gap.read_rows(RECORD), key=lambda row: row["seed"])
        seeds = {row["seed"] for row in rows}
        counts = Counter((row["model"], row["share"]) for row in rows)  # a model counts where all seeds have it
        rows = [row for row in rows if counts[row["model"], row["share"]] == len(seeds)]
        draw(rows, gap.HERE / "prose.png")
        write_text(gap.HERE / "prose.md", write_page(rows))


if __name__ == "__main__":
    main()
