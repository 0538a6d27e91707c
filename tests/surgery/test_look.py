"""The quick look: what it counts, and whether it sends a user on or away."""

import json

import pytest

import surgery as package
from surgery.commands import look as looking
from surgery.commands.look import CONTEXTS, ModelLook, look
from surgery.models.cache import cache_bytes, prefilled
from surgery.world.tokenizer import build_tokenizer, is_of_the_world
from tests.models import TINY, VOCABULARY, random_base


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Fewer questions."""
    monkeypatch.setattr(looking, "MOST", 40)
    monkeypatch.setattr(looking, "PAIRS", (4, 32))
    monkeypatch.setattr(looking, "CONTEXTS", (300, *CONTEXTS))


def test_a_random_model_is_not_worth_editing(surgery, tmp_path):
    base = random_base(vocab_size=VOCABULARY)
    base.save_pretrained(tmp_path / "base")
    build_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text("What a base says of words that it never saw. " * 200)
    status, out, err = surgery("look", "base", "--text", "text.txt", "--out", "look.json")
    assert status == 0, err
    verdict = out.splitlines()[-1]
    assert verdict.startswith("Verdict: not worth editing, because it does not retrieve: with dictionaries of 4 entries")
    seen = ModelLook.read(tmp_path / "look.json")
    assert str(seen) == out.rstrip()
    assert not seen.worth
    assert list(seen.retrieval) == ["4"]  # larger ones are not asked
    assert seen.on_text is not None
    assert seen.on_text.uniform == pytest.approx(7.4, abs=0.1)
    assert verdict.endswith("no better than guessing among all tokens.") == seen.on_text.hopeless
    status, out, _ = surgery("look", "base", "--json", "--out", "look.json")  # its own file may be replaced
    assert (status, json.loads(out)["on_text"], json.loads(out)["worth"]) == (0, None, False)
    status, out, err = surgery("look", "base", "--text", "nowhere.txt")
    assert (status, out, err.count("\n"), "nowhere.txt" in err) == (2, "", 1, True), err


def test_a_model_that_retrieves_is_worth_a_try():
    base = package.load(str(TINY))
    seen = look(base)
    assert seen.worth
    assert seen.verdict.startswith("worth trying: it retrieves")
    assert (seen.editable, seen.heads, seen.why_not, seen.model_type) == ((0, 1, 2, 3), 8, "", "mamba2")
    assert seen.pairs == 32  # 4 are answered nearly all
    held = seen.held[0]
    assert held.bytes == cache_bytes(prefilled(base.model, 300))  # counted from shorter prompts
    hybrid = package.splice(base, package.Plan(kind="head", sites=(package.Site(0, (0,)),)))
    assert held.bytes + held.a_head == cache_bytes(prefilled(hybrid, 300))
    assert look(hybrid, base.tokenizer).verdict == "not worth editing, because it is a hybrid already."
    attentive = look(package.load(str(TINY.parent / "tiny-hybrid")))
    assert not attentive.worth
    assert "Windows for some of its 2 groups of attention heads may shrink the cache" in attentive.verdict


def test_the_built_in_models_alone_know_the_small_world():
    words = build_tokenizer()
    assert is_of_the_world(words)
    words.add_tokens(["another"])
    assert not is_of_the_world(words)
