"""How much of the gap on prose does a brief edit close?

    python recipes/evidence/gap/prose.py BOOKS --seeds 1 2 3    measure what prose.jsonl does not hold yet
    python recipes/evidence/gap/prose.py --page                 prose.md and prose.png, from what is measured

BOOKS is a folder with train/ and valid/ of the novels of checkpoints/tiny-names, whose README says where they are from. The
base, its twins, the edits and the rivals are those of gap.py, at a million parameters and with the tokenizer of
checkpoints/tiny-names. Pretraining sees windows of train/ in which rare tokens have exchanged names, so that they can only be
recalled, and some of which repeat a passage of their own; windows and passages are short at first, without which none of these
models learns to recall in so few tokens. It sees dictionaries and joint recall as well, so that a base has several forms of
retrieval. Heads are located on repeated rare bigrams of four novels of valid/, and models are measured on the others, by
authors of whom nothing was learnt: the loss on repeated rare bigrams, on the other tokens and on all, at the length of
pretraining, twice and four times that. Other edits are located and tuned on dictionaries, joint recall and questions about
running text (running_text.py), and all are asked everything. --shape takes another base, and fewer models. Another curriculum
needs an empty runs/gap/prose: a training goes on from what is there.
"""

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import gap
import numpy as np
import torch
from running_text import guesses, make_questions, write_questions
from transformers import AutoTokenizer

import surgery
from surgery.evaluation.controls import fit_copy_cache
from surgery.evaluation.suites import Given, Measurement, ask_probe
from surgery.records.recipe import Examples, Hints
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
WIDE = BASE["architecture"] | {"hidden_size": 320, "num_hidden_layers": 6, "num_heads": 20}
MAMBA1 = {"model_type": "mamba", "hidden_size": 128, "num_hidden_layers": 4, "state_size": 16, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {  # other bases
    "5m": BASE | {"architecture": WIDE, "learning_rate": 2.5e-3, "embedding_std": 0.04},
    "mamba1": BASE | {"architecture": MAMBA1},
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
CLOSER, HINTED = "held closer", "held closer, hints"
CLOSER_BY = 4.0  # the KL weight of CLOSER and HINTED
RIVALS = ("copy cache", *gap.RIVALS)
BRIEF = [("base", 0.0), ("twin", 0.0), ("2 heads", 0.0), ("2 heads", gap.EQUAL), ("copy cache", 0.0)]  # of other shapes
BRIEF += [(name, gap.EQUAL) for name in ("same layer", "adapters", CLOSER, "window", "all weights")]
BRIEF += [("2 heads", LONG), (HINTED, gap.EQUAL), ("no null key", gap.EQUAL), ("hints", gap.EQUAL)]
SOONER = ("copy cache", "same layer", "adapters", "window", "all weights")
Row = dict[str, Any]


def list_cells() -> list[tuple[str, float]]:
    """(model, share of the pretraining tokens) of a seed, in the order in which they are measured."""
    cells = [("base", 0.0), ("twin", 0.0), ("2 heads", 0.0), *((name, gap.EQUAL) for name in ("2 heads", *OTHERS))]
    cells += [
        (name, 0.0 if name in ("prompt twice", "copy cache") else gap.EQUAL) for name in dict.fromkeys((*SOONER, *RIVALS))
    ]
    cells += [(CLOSER, gap.EQUAL), (HINTED, gap.EQUAL), *UNTRAINED, *(("2 heads", share) for share in SHARES[1:-1])]
    cells += [(name, gap.EQUAL) for name in (*EDITS, "hints")]
    return [*cells, ("2 heads", SHARES[-1]), ("twin layer", 0.0)]


def take_books(books: Path, shape: str | None = None) -> None:
    """What gap.py trains from now on, on what, and where it keeps it."""
    held = WORK / "held-out"
    held.mkdir(parents=True, exist_ok=True)
    for file in sorted((books / "valid").glob("*.txt")):
        if not file.name.startswith(AUTHORS):
            write_text(held / file.name, read_text(file))
    gap.BASE, gap.WORK, gap.WIDTH = (SHAPES[shape], WORK / shape, WIDTH) if shape else (BASE, WORK, WIDTH)
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

    def make(self, name: str, share: float) -> tuple[Any, Row]:
        return self.other(name).make("2 heads", share) if name in OTHERS else super().make(name, share)

    @cache  # noqa: B019
    def asked(self) -> list[Measurement]:
        given = Given(self.tokenizer, gap.BENCH, gap.DATA, self.seed)
        joint = ask_probe(given, "joint.16", "joint recall, 16 pairs", "joint, 16", "kv", pairs=16, keys="seen", joint=True)
        source = str(WORK / "bench.jsonl")
        return [*super().asked(), joint, ask_probe(given, "questions", "questions", "questions", "knowledge", source=source)]

    def open_training(self, recipe: Any, name: str) -> Any:
        return ProseTraining(recipe, self.tokenizer, gap.WORK / f"{self.seed}-{name}", self.corpus)

    def begin(self, name: str) -> tuple[Any, Any, surgery.Tune, int]:
        variants: dict[str, tuple[str, Row]] = {
            "hints": ("no null key", {"hints": Hints()}),
            CLOSER: ("2 heads", {"kl_weight": CLOSER_BY}),
            HINTED: ("2 heads", {"kl_weight": CLOSER_BY, "hints": Hints()}),
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


def record_of(shape: str | None) -> Path:
    return RECORD.with_stem(f"prose-{shape}") if shape else RECORD


def main() -> None:
    """Measure, and write the page."""
    books = {"type": Path, "nargs": "?", "help": "a folder with train/ and valid/"}
    shape = {"choices": list(SHAPES), "help": "another base, of which fewer models are measured"}
    arguments = {"books": books, "--shape": shape}
    given = gap.parse_arguments(__doc__, "write prose.md and prose.png from what is measured", **arguments)
    if given.seeds:
        take_books(given.books, given.shape)
        cells = BRIEF if given.shape else list_cells()
        gap.measure_all(given.seeds, record_of(given.shape), cells, lambda seed: Prose(seed, given.books))
    if given.page:
        import prose_page  # which imports this file

        prose_page.main()


if __name__ == "__main__":
    main()
