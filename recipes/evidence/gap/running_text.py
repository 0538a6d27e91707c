"""Questions about running text: who, where, which number. Makes a file of facts of novels, which surgery reads as it is.

    python recipes/evidence/gap/running_text.py questions.jsonl BOOKS/valid/*.txt --count 300
    surgery bench MODEL --set bench.suites=knowledge --set data.facts=questions.jsonl

A line is a passage of consecutive paragraphs and, behind an empty line, one of its sentences again up to a name or a number,
which answers: {"prompt": ..., "answer": " Clare", "choices": [...]}. The choices are all persons, all places or all numbers of
the passage, and each is asked for as often as the others where there is a sentence to it. The sentence's words stand in the
passage once, in its first two thirds. Who is a person and what is a place is decided by the whole novel: a person has a title
or speaks, a place has neither, and stands behind a preposition of place.
"""

import argparse
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surgery.runtime.files import read_text, write_text

ASKED = ("who", "where", "which number")
WORDS = (110, 260)  # of a passage
REPEATED = (5, 14)  # words of the sentence that a question repeats
FEWEST = 2  # times that a novel has to say of a name what it is
CHOICES = (2, 8)
SENTENCE_END = r"(?<!Mr)(?<!Mrs)(?<!Dr)[.!?][\"']? |\n\n"
NAME = r"([A-Z][a-z]{2,})"
SPEAKS = "said|says|cried|replied|asked|answered|exclaimed|returned|continued|observed|murmured|whispered"
PERSON = rf"\b(?:Mr\.|Mrs\.|Miss|Dr\.|Sir|Lady|Captain|Farmer|Uncle|Aunt|{SPEAKS}) {NAME}|\b{NAME} (?:{SPEAKS})\b"
PLACE = rf"\b(?:in|at|near|from|towards|reached|left) {NAME}"
NUMBER = (
    r"\b((?:twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)(?:-[a-z]+)?|two|three|four|five|six|seven|eight|nine|ten|"
    r"eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|hundred|thousand|[1-9][0-9]*)\b"
)
NO_NAMES = (
    "Sir Lady Lord Mrs Miss Captain Farmer Uncle Aunt The This That There They Then She His Her Its And But For Not You Your "
    "What When Where Christmas Latin English French Little High East West North South Who Why How Well Yes".split()
)
Line = dict[str, Any]


def names_in(text: str, pattern: str) -> Counter[str]:
    """How often a novel says of which name that it is a person, or a place."""
    found = Counter(name for groups in re.findall(pattern, text) for name in ([groups] if isinstance(groups, str) else groups))
    return Counter({name: count for name, count in found.items() if name and name not in NO_NAMES and count >= FEWEST})


def kinds_of(text: str) -> dict[str, str]:
    """kind -> the pattern of what may answer, in one novel."""
    persons = names_in(text, PERSON)
    places = [name for name in names_in(text, PLACE) if not re.search(PERSON.replace(NAME, f"({name})"), text)]
    words = {"who": list(persons), "where": places}
    return {kind: rf"\b({'|'.join(sorted(names))})\b" for kind, names in words.items() if names} | {"which number": NUMBER}


def passages(text: str) -> list[str]:
    """The paragraphs of a novel, as many to a passage as it takes, of which no two overlap."""
    found, open_ = [], ""
    for paragraph in re.split(r"\s*\n\s*\n\s*", text.strip()):
        open_ = f"{open_}\n\n{' '.join(paragraph.split())}".strip()
        words = len(open_.split())
        if words >= WORDS[0]:
            found += [open_] if words <= WORDS[1] else []
            open_ = ""
    return found


def ask(passage: str, kind: str, pattern: str, rng: random.Random) -> Line | None:
    """A question about a passage; None where it has none of this kind."""
    said = [(match.start(), match.group(1)) for match in re.finditer(pattern, passage)]
    places: dict[str, list[str]] = defaultdict(list)
    for start, answer in said:
        begin = max((match.end() for match in re.finditer(SENTENCE_END, passage[:start])), default=0)
        repeated = " ".join(passage[begin:start].split()[-REPEATED[1] :])
        long = repeated.count(" ") + 1 >= REPEATED[0]
        if long and passage.count(repeated) == 1 and start < len(passage) * 2 / 3 and passage[start - 1] == " ":
            places[answer].append(repeated)
    names = {name for _, name in said}
    if not places or not CHOICES[0] <= len(names) <= CHOICES[1]:
        return None
    answer = rng.choice(sorted(places))
    choices = [f" {name}" for name in rng.sample(sorted(names), len(names))]
    return {"prompt": f"{passage}\n\n{rng.choice(places[answer])}", "answer": f" {answer}", "choices": choices}


def guess(line: Line, rule: str) -> bool:
    """Whether a rule that does not read the question answers it."""
    passage = line["prompt"].rpartition("\n\n")[0]
    said = re.findall("|".join(rf"(?<= ){name.strip()}\b" for name in line["choices"]), passage)
    counts = Counter(said)
    found = {"last": said[-1], "most said": counts.most_common()[0][0], "least said": counts.most_common()[-1][0]}
    return bool(f" {found[rule]}" == line["answer"])


def guesses(lines: Sequence[Line]) -> dict[str, float]:
    """What chance and rules that do not read the questions answer."""
    right = {rule: sum(guess(line, rule) for line in lines) / len(lines) for rule in ("last", "most said", "least said")}
    return {"chance": sum(1 / len(line["choices"]) for line in lines) / len(lines)} | right


def make_questions(files: Sequence[Path], count: int, seed: int = 0) -> dict[str, list[Line]]:
    """kind -> questions, at most `count` in all, one a passage."""
    asked: dict[str, list[Line]] = {kind: [] for kind in ASKED}
    drawn = []
    for file in sorted(files):
        text = read_text(file)
        patterns = kinds_of(text)
        drawn += [(passage, patterns) for passage in passages(text)]
    rng = random.Random(f"running text {seed}")
    rng.shuffle(drawn)
    for passage, patterns in drawn:
        for kind in sorted(patterns, key=lambda kind: len(asked[kind])):  # that of which there are fewest
            line = ask(passage, kind, patterns[kind], rng)
            if line is not None:
                asked[kind].append(line)
                break
    chosen = {kind: lines[: count // len(ASKED)] for kind, lines in asked.items()}
    for kind, lines in asked.items():  # others in the place of those of which there are too few
        chosen[kind] += lines[len(chosen[kind]) :][: count - sum(map(len, chosen.values()))]
    return chosen


def write_questions(path: Path, asked: dict[str, list[Line]]) -> None:
    """Write them as facts, a line each."""
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for kind in asked for line in asked[kind]]
    write_text(path, "".join(lines))


def main() -> None:
    """Make the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("novels", type=Path, nargs="+")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.out.exists():  # with the first argument forgotten, it is a novel
        parser.error(f"{given.out} exists; give a new file")
    asked = make_questions(given.novels, given.count, given.seed)
    write_questions(given.out, asked)
    print(", ".join(f"{len(lines)} {kind}" for kind, lines in asked.items()))
    right = guesses([line for lines in asked.values() for line in lines])
    print(f"right without the question: {', '.join(f'{rule} {share:.3f}' for rule, share in right.items())}")


if __name__ == "__main__":
    main()
