"""The page of the gap: what it says of a record, and what it does not."""

import importlib.util
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("gap", ROOT / "recipes" / "evidence" / "gap" / "gap.py")
assert SPEC is not None
assert SPEC.loader is not None
gap: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gap)
sys.path.insert(0, str(gap.HERE))
import pairs  # noqa: E402
from running_text import make_questions  # noqa: E402


def record(scores: dict[str, float], seeds: int = 3) -> list[dict[str, Any]]:
    """Rows of all cells; a model that is not named scores .3 in everything."""
    rng, rows = np.random.default_rng(0), []
    for seed in range(seeds):
        for name, share in gap.list_cells():
            right = rng.random(200) < scores.get(name, 0.3)
            results = {asked: gap.pack(right.astype(float), "accuracy") for asked in (*gap.QUESTIONS, "kv.16")}
            row = {"seed": seed, "model": name, "share": share, "results": results, "trained": 10, "cache_bytes": 2048}
            row |= {"tokens": {"kv": 5, "text": 5}, "cpu_seconds": 1.0, "sites": {"2": ["L0.H1,2"]}}
            rows.append(row | {"provenance": {"packages": {"torch": "2"}, "machine": "a machine"}})
    return rows


def first_sentence(page: str) -> str:
    return page.splitlines()[2]


def test_answers_are_kept_whole() -> None:
    decisions = np.random.default_rng(0).random(203) < 0.4
    assert (gap.unpack(gap.pack(decisions.astype(float), "accuracy")) == decisions).all()
    losses = np.array([1.25, 0.0, 3.5])
    assert gap.unpack(gap.pack(losses, "loss")).tolist() == losses.tolist()


def test_a_share_is_that_of_the_gap(tmp_path: Path) -> None:
    rows = record({"2 heads": 0.6, "twin": 0.9, "twin layer": 0.3})
    over, alone = gap.shares(rows, ("2 heads", gap.EQUAL), "kv.64", "twin")
    assert over.low <= 0.5 <= over.high
    assert len(alone) == 3
    assert gap.shares(rows, ("2 heads", gap.EQUAL), "kv.64", "twin layer")[0] is None  # there is no such gap
    gap.draw(rows, tmp_path / "gap.png")
    assert (tmp_path / "gap.png").stat().st_size


@pytest.mark.parametrize("winner", ["all weights", "prompt twice"])
def test_a_rival_that_wins_is_named_first(winner: str) -> None:
    sentence = first_sentence(gap.write_page(record({"2 heads": 0.6, "twin": 0.9, winner: 0.8})))
    assert gap.RIVALS[winner].lower() in sentence.lower()


def test_seeds_that_are_not_complete_do_not_count() -> None:
    rows = record({"2 heads": 0.6, "twin": 0.9}, seeds=2)
    assert gap.write_page(rows[:-1]) == gap.write_page(rows[: len(gap.list_cells())])
    assert first_sentence(gap.write_page(rows[:9]))  # of the only seed, which is not complete
    for few in (0, 1, 5):
        assert "|" not in gap.write_page(rows[:few])  # no table of what is not known


def figures(text: str) -> set[str]:
    return set(re.findall(r"\d\.\d{2,}", text))


def test_the_page_is_that_of_the_record() -> None:
    assert (gap.HERE / "README.md").read_text() == gap.write_page(gap.read_rows())


def test_the_page_of_all_pairs_is_that_of_its_record() -> None:
    assert (gap.HERE / "pairs.md").read_text() == pairs.write_page(gap.read_rows(pairs.RECORD), gap.read_rows())


@pytest.mark.parametrize("page", ["README.md", "docs/claims.md"])
def test_every_figure_that_is_quoted_stands_in_the_pages_of_the_study(page: str) -> None:
    study = figures(" ".join(file.read_text() for file in gap.HERE.glob("*.md")))
    quoted = figures(" ".join(line for line in (ROOT / page).read_text().splitlines() if "evidence/gap/" in line))
    assert quoted
    assert quoted <= study


def test_the_answer_to_a_question_about_running_text_is_where_its_sentence_stood(tmp_path: Path) -> None:
    rng, novel = random.Random(0), tmp_path / "novel.txt"
    told = "When the day of the {} was over {} men came by road from {} and met Mr. {} there, said {}. "
    days = ["fair", "hunt", "flood", "storm", "wedding", "harvest", "frost", "races"]
    words = (["two", "six", "forty"], ["Melton", "Stoke", "Weyhill"], ["Oak", "Troy", "Poole"], ["Oak", "Troy", "Poole"])
    novel.write_text("\n\n".join("".join(told.format(day, *map(rng.choice, words)) for day in days) for _ in range(60)))
    asked = make_questions([novel], 30)
    assert all(asked.values())
    for line in (line for lines in asked.values() for line in lines):
        passage, repeated = line["prompt"].split("\n\n")
        said = re.findall("|".join(choice.strip() for choice in line["choices"]), passage)
        assert {*said} == {choice.strip() for choice in line["choices"]}
        assert passage.count(repeated) == passage.count(repeated + line["answer"]) == 1
