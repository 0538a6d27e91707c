"""Small hybrids that read the toy data, and settings of a few steps."""

from typing import Any

import torch

from surgery.probes.toy_tokenizer import build_tokenizer
from surgery.records.recipe import Data, Examples, Tune
from tests.surgery.modeling.bases import make_base, make_hybrid

TOKENIZER = build_tokenizer()
WORDS = -(-len(TOKENIZER) // 16) * 16


def toy_base(family: str = "mamba2", dtype: torch.dtype = torch.float64) -> Any:
    """A random base with the toy data's tokens."""
    return make_base(family, dtype=dtype, vocab_size=WORDS)


def toy_hybrid(family: str = "mamba2", dtype: torch.dtype = torch.float64, gate: float = 0.7) -> Any:
    """A hybrid of a random base, with the toy data's tokens."""
    from surgery.records.plan import Plan
    from surgery.splicing.splice import splice

    plan = Plan(**make_plan(family), gate=gate)
    return splice(toy_base(family, dtype), plan).eval()


def make_plan(family: str) -> dict[str, Any]:
    """Sites and starts of make_hybrid."""
    hybrid = make_hybrid(family)
    sites = tuple(f"L{entry['layer']}.H{','.join(map(str, entry['heads']))}" for entry in hybrid.config.grafts)
    heads = [f"L{entry['layer']}.H{head}" for entry in hybrid.config.grafts for head in entry["heads"]]
    return {"sites": sites, "starts": {head: {"sign": 1, "tau": 0.8, "null": 0.5} for head in heads}}


def few_steps(**more: Any) -> Tune:
    """Settings of a run that takes a second."""
    given: dict[str, Any] = {"steps": 4, "batch_size": 4, "text_batch_size": 2, "text_tokens": 24, "warmup_steps": 1}
    return Tune(**given | {"examples": (Examples(options={"pairs": (2, 4)}),), "learning_rate": 0.01} | more)


def weights(model: Any) -> dict[str, torch.Tensor]:
    """A copy of all parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


TOY = Data()
