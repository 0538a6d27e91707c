"""What a user is told who gave the wrong thing: one line that says what to do, and status 2."""

import shutil

import pytest
import torch

import surgery as package
from surgery.cli.app import main  # noqa: F401  # the fixture `surgery` calls it
from surgery.loading import hub
from surgery.world.tokenizer import build_tokenizer
from tests.models import VOCABULARY, random_base


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A base; a hybrid of it; one whose attention starts at random; a base without a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = build_tokenizer()
    base = random_base(vocab_size=VOCABULARY)
    base.save_pretrained(folder / "alone")
    shutil.copytree(folder / "alone", folder / "base")
    tokenizer.save_pretrained(folder / "base")
    for name, plan in {
        "hybrid": package.Plan(sites=("L1.H0",)), "random": package.Plan(kind="layer", sites=("L1",), init="random")
    }.items():  # fmt: skip
        opened = package.load(folder / "base")
        package.splice(opened, plan).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    package.Plan(sites=("L1.H0",)).write(folder / "plan.json")
    return folder


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("locate", "{m}/alone"), "alone holds no tokenizer: say where one is (tokenizer: in a recipe, or --set tokenizer"),
        (("locate", "{m}/base", "--set", "tokenizer=no/such"), "cannot load the tokenizer no/such: the Hub may not be asked"),
        (("locate", "{m}/base", "--set", "device=cud"), "device must be auto, cpu, cuda, cuda:1, ..., not 'cud'"),
        (("splice", "{m}/hybrid", "{m}/plan.json", "--out", "x"), "hybrid is a hybrid already; grafts go into its base, "),
        (("tune", "{m}/base", "--out", "x"), "base is no hybrid: it holds no plan.json. If it is a base, give it grafts first"),
        (("tune", "no/such", "--out", "x"), "no such folder: no/such; a hybrid is a folder that `surgery splice`"),
    ],
)  # fmt: skip
def test_the_wrong_thing_is_one_line_and_status_2(surgery, models, tmp_path, arguments, complaint):
    status, out, err = surgery(*(argument.format(m=models) for argument in arguments))
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert complaint in err
    assert list(tmp_path.iterdir()) == [], "something was written"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_no_gpu(surgery, models):
    status, _, err = surgery("locate", models / "base", "--set", "device=cuda")
    assert (status, err.count("\n")) == (2, 1)
    assert "device is 'cuda', and no such device is here" in err
    assert "set device=cpu, or leave it at auto" in err


def test_the_hub_out_of_reach(monkeypatch):
    """In words, by what went wrong, and not in the words of its client."""
    import huggingface_hub.constants
    from huggingface_hub import errors

    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    assert "the Hub cannot be reached" in hub.why_not_fetched(errors.LocalEntryNotFoundError("no connection"))
    assert "the Hub cannot be reached" in hub.why_not_fetched(OSError("We couldn't connect to 'https://huggingface.co'"))
    assert hub.why_not_fetched(ValueError("first\nsecond")) == "ValueError: first"


def test_a_hybrid_can_be_located_in_and_is_told_apart(surgery, models, tmp_path):
    settings = [part for s in ("options.pairs=3", "examples=4", "batch_size=4") for part in ("--set", f"locate.{s}")]
    status, _, err = surgery("locate", models / "hybrid", *settings, "--out", "located")
    assert status == 0, err
    assert "hybrid is a hybrid: its heads can be measured, but grafts go into its base" in err
    status, _, err = surgery("plan", "located/ranking.json")
    assert status == 2
    assert "cannot be spliced: it has grafts already" in err


def test_attention_that_starts_at_random_is_to_be_tuned_before_use(surgery, models):
    """Said before it is compared; nothing is said of a graft that starts as the head that it replaces."""
    small = [part for s in ("pairs=3", "unseen_pairs=[]", "limit=2", "windows=1", "window=16", "contexts=16")
             for part in ("--set", f"bench.{s}")]  # fmt: skip
    status, _, err = surgery("bench", models / "base", models / "random", models / "hybrid", *small, "--out", "compared")
    assert status == 0, err
    assert err.count("tune it before use") == 1
    assert "random: its attention started at random, and no tuning is on record" in err
