"""A fingerprint is that of the model as it is now."""

from typing import Any

import pytest
import torch
from tokenizers.normalizers import Lowercase
from transformers import AutoModelForCausalLM

from surgery.models.digests import fingerprint, tokenizer_digest
from surgery.splicing.splice import adopt, unsplice
from tests.surgery.exporting.folders import make_tokenizer
from tests.surgery.modeling import bases, stock_bases

NAMES = pytest.mark.parametrize("name", ["mamba2", "llamba", "jamba", "zamba2", "olmo_hybrid"])


def make(name: str, what: str = "base") -> Any:
    return getattr(bases if name in bases.BASES else stock_bases, f"make_{what}")(name, dtype=torch.float32)


@NAMES
def test_one_model_has_one_fingerprint(name: str, tmp_path: Any) -> None:
    base = make(name)
    own = fingerprint(base)
    assert fingerprint(adopt(base)) == own
    hybrid = make(name, "hybrid")
    assert fingerprint(unsplice(hybrid)) == own
    for model in (base, hybrid):
        model.save_pretrained(tmp_path / type(model).__name__, max_shard_size="10KB")
        assert fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path / type(model).__name__)) == fingerprint(model)
    assert fingerprint(make(name, "hybrid")) == fingerprint(hybrid) != own


@NAMES
def test_whatever_changes_the_function_changes_the_fingerprint(name: str) -> None:
    hybrid, seen = make(name, "hybrid"), set()

    def look() -> None:
        seen.add(fingerprint(hybrid))

    look()
    with torch.no_grad():
        next(iter(hybrid.graft_parameters().values())).add_(1e-3)
    look()
    hybrid.config.grafts[0]["closed_below"] = 0.25
    look()
    hybrid.config.rms_norm_eps = 0.5
    look()
    look()
    hybrid.to(torch.bfloat16)
    look()
    assert len(seen) == 5
    hybrid.config.use_cache, hybrid.config.eos_token_id = False, 7
    look()
    assert len(seen) == 5


def test_a_tokenizer_is_known_by_how_it_divides_text() -> None:
    known, other = tokenizer_digest(words := make_tokenizer()), make_tokenizer()
    words(["w1", "w1 w2"], padding=True, truncation=True, max_length=2)
    other.backend_tokenizer.normalizer = Lowercase()
    assert tokenizer_digest(words) == known != tokenizer_digest(other)
    assert words.get_vocab() == other.get_vocab()
