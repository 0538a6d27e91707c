"""Does what the edit closes of the gap hold in longer prompts, and in questions that it was not tuned on?

    python recipes/evidence/gap/reach.py --seeds 6 7    measure what reach.jsonl does not hold yet
    python recipes/evidence/gap/reach.py --page         reach.md, from reach.jsonl

The base, its twin, and the edit before and after its tuning on dictionaries, on seeds of gap.py with trainings in runs/gap.
"""

import random
import time
from dataclasses import replace
from typing import Any

import gap

from surgery.evaluation.suites import Given, Measurement, ask_probe, ask_questions
from surgery.probes import make_probe
from surgery.probes.kv import ask_value
from surgery.probes.toy import document
from surgery.runtime.files import write_text
from surgery.runtime.progress import say
from surgery.splicing.splice import adopt

RECORD = gap.HERE / "reach.jsonl"
CELLS = (("base", 0.0), ("twin", 0.0), ("2 heads", 0.0), ("2 heads", gap.EQUAL))
TIMES = (1, 2, 4)  # the length of a prompt with 64 pairs
SECONDS = 40  # of one core a cell, of which the budget is made that is said beforehand
ASKED = {
    "length.1": "64 pairs",
    "length.2": "64 pairs, twice the length: text before the question",
    "length.4": "64 pairs, four times the length",
    "kv.100": "100 pairs",
    "mqar.16": "16 pairs of words, four keys asked, the last one scored",
    "hops.8": "8 chains of two hops",
    "choice": "multiple choice by letters",
}


def lengthened(given: Given, times: int) -> Measurement:
    """64 pairs, with held-out text between dictionary and question, so that the prompt is so many times as long."""
    questions = []
    drawn = make_probe("kv", given.tokenizer, pairs=64).questions(given.options.limit, given.question_seed)
    for number, question in enumerate(drawn):
        start = question.prompt.rindex(ask_value("").partition("'")[0])
        least, between = times * count(given, question.prompt), ""
        rng = random.Random(f"text {number} {given.question_seed}")
        while times > 1 and count(given, question.prompt + between) < least:
            between += document(rng, held_out=True, sentences=4) + "\n"
        prompt = question.prompt[:start] + between + question.prompt[start:]
        questions.append(replace(question, prompt=prompt, spans=(), evidence=None))
    name = f"length.{times}"
    return ask_questions(given.tokenizer, given.options, name, ASKED[name], name, tuple(questions))


def count(given: Given, text: str) -> int:
    return len(given.tokenizer(text)["input_ids"])


def asked(given: Given) -> list[Measurement]:
    """What all models are asked."""
    options: dict[str, dict[str, Any]] = {
        "kv.100": {"pairs": 100},
        "mqar.16": {"pairs": 16},
        "hops.8": {"pairs": 8},
        "choice": {},
    }
    others = [ask_probe(given, name, ASKED[name], name, name.partition(".")[0], **options[name]) for name in options]
    return [*(lengthened(given, times) for times in TIMES), *others]


def measure_all(seeds: list[int]) -> None:
    """Measure cell by cell what the record does not hold."""
    rows = gap.read_rows(RECORD)
    done = {(row["seed"], row["model"], row["share"]) for row in rows}
    todo = [(seed, *cell) for seed in seeds for cell in CELLS if (seed, *cell) not in done]
    say(f"{len(todo)} cells: about {len(todo) * SECONDS / 60:.0f} minutes of one core")
    current = gap.Seed(seeds[0])
    for seed, name, share in todo:
        started = time.process_time()
        current = current if current.seed == seed else gap.Seed(seed)
        model = adopt(current.make(name, share)[0])
        given = Given(current.tokenizer, gap.BENCH, gap.DATA, seed)
        results = {each.name: gap.pack(each.ask(model), each.metric) for each in asked(given)}
        spent = round(time.process_time() - started, 1)
        gap.add_row(RECORD, {"seed": seed, "model": name, "share": share, "results": results, "cpu_seconds": spent})


PAGE = """# Longer prompts, and other questions

Seeds {seeds} of [the gap](README.md). {limit} questions of a kind, the same for all models of a seed.
The edit is tuned on {equal:.0%} of the pretraining tokens: dictionaries of 16 to 64 pairs. No model was taught words with four
keys asked, chains or letters. Share closed and its interval are those of that page.

{table}

{minutes:.0f} minutes of processor time. `reach.py` measures, and writes this page; `reach.jsonl` is the record.
"""


def write_page(rows: list[dict[str, Any]]) -> str:
    """The page, from the record."""
    head = ["", "base", "twin", "edit, untrained", "edit", "share closed", "edit, by seed"]
    lines = [head, ["---"] * len(head)]
    for name, words in ASKED.items():
        found = gap.shares(rows, CELLS[-1], name, "twin")
        by_seed = [f"{each.mean():.3f}" for _, each in sorted(gap.values(rows, CELLS[-1], name).items())]
        lines.append([words, *(gap.mean(rows, cell, name) for cell in CELLS), gap.show(found), ", ".join(by_seed)])
    return PAGE.format(
        seeds=", ".join(map(str, sorted({row["seed"] for row in rows}))),
        limit=gap.BENCH.limit,
        equal=gap.EQUAL,
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
        minutes=sum(row["cpu_seconds"] for row in rows) / 60,
    )


def main() -> None:
    """Measure, and write the page."""
    given = gap.parse_arguments(__doc__, "write reach.md from reach.jsonl")
    if given.seeds:
        measure_all(given.seeds)
    if given.page:
        write_text(gap.HERE / "reach.md", write_page(gap.read_rows(RECORD)))


if __name__ == "__main__":
    main()
