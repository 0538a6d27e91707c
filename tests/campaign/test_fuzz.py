"""The campaign of bad inputs itself: a number and a seed give the same input again, and nothing that is wrong passes."""

import json
import os
import random
import struct

import pytest

from tests.campaign.mutations import Mutator, arbitrary, dumped
from tests.campaign.trial import LONGEST, MEMORY, Outcome, attempt, complaints, kept_measurements, listing

TREE = {"a": [1, 2.5, None], "b": {"c": "text", "d": True}}


def test_inputs_are_drawn_from_the_seed_alone():
    pools = [arbitrary(3, 20) for _ in range(2)]
    assert repr(pools[0]) == repr(pools[1])
    mutators = [Mutator(random.Random(1), pool) for pool in pools]
    for change in ("tree", "text", "bytes"):
        given = {"tree": TREE, "text": json.dumps(TREE, indent=1), "bytes": struct.pack("<Q", 2) + b"{}"}[change]
        drawn = [[repr(getattr(mutator, change)(given))[:1000] for _ in range(50)] for mutator in mutators]
        assert drawn[0] == drawn[1]
        assert len({*drawn[0]}) > 20
    assert TREE == {"a": [1, 2.5, None], "b": {"c": "text", "d": True}}, "what is spoilt is a copy"


def test_files_are_spoilt_and_those_that_they_link_to_are_not(tmp_path):
    for number in range(60):
        good, link = tmp_path / "good.json", tmp_path / f"{number}.json"
        good.write_bytes(dumped(TREE))
        link.symlink_to(good)
        mutator = Mutator(random.Random(number), [])
        mutator.json_file(link)
        assert good.read_bytes() == dumped(TREE)


@pytest.mark.parametrize(
    ("outcome", "hung", "says"),
    [
        (Outcome(status=1, said="Traceback (most recent call last):"), "", "noise"), (Outcome(status=-11), "", "SIGSEGV"),
        (Outcome(status=2), "", "no line"), (Outcome(status=2, said="surgery: " + "x" * LONGEST), "", "a line of"),
        (Outcome(status=-9), "hangs", "hangs"), (Outcome(memory=MEMORY + 1), "", "memory"), (Outcome(status=1), "", "status 1"),
        (Outcome(said="x.py:3: UserWarning: y"), "", "noise"),
    ],
)  # fmt: skip
def test_what_must_not_be_is_seen(outcome, hung, says):
    assert says in " ".join(complaints(outcome, hung, (0, 2)))


def test_a_refusal_and_a_good_end_are_well():
    assert not [*complaints(Outcome(status=2, said="opening\nsurgery: no such folder: x"), "", (0, 2))]
    assert not [*complaints(Outcome(status=0, said="advice: tune it"), "", (0, 2))]


def test_what_was_measured_before_a_number_that_is_not_finite_may_stay():
    said, measured = "locating\nsurgery: the gradients are not finite\n", ["out", "out/locate", "out/locate/a.safetensors"]
    assert kept_measurements(said, [*measured, "out/recipe.yaml", "out/run.json"])
    assert not kept_measurements(said, [*measured, "out/ranking.json"])
    assert not kept_measurements("surgery: no such file: x\n", measured)
    worthless, ranked = (
        "surgery: no head is worth its cache: of the 8 leading ones none\n",
        ["out/ranking.json", "out/atlas.png"],
    )
    assert kept_measurements(worthless, [*measured, *ranked, "out/planning/b"])
    assert not kept_measurements(worthless, [*measured, "out/plan.json"])


def test_a_trial_sees_what_a_refused_command_has_written(tmp_path, monkeypatch):
    """In a child of its own, which leaves this process as it is."""
    from surgery.cli import app

    def write_and_refuse():
        with open("left", "w") as file:
            file.write("x")
        raise SystemExit(2)

    (tmp_path / "trial").mkdir()
    monkeypatch.setattr(app, "main", write_and_refuse)
    here = os.getcwd()
    outcome = attempt(["locate"], tmp_path / "trial")
    assert (outcome.status, os.getcwd()) == (2, here)
    assert "wrote: left" in outcome.wrong
    assert {name for name, _ in listing(tmp_path / "trial")} == {"left"}
