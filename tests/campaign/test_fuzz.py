"""The campaign of bad inputs itself: a number and a seed give the same input again, and nothing that is wrong passes."""

import json
import os
import random
import struct

import pytest

from tests.campaign.mutations import Mutator, arbitrary
from tests.campaign.trial import LONGEST, MEMORY, Outcome, attempt, complaints, listing

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
