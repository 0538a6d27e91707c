"""Small random bases, and hybrids of them whose grafts matter."""

from typing import Any

import torch
from torch._dynamo.testing import CompileCounter
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    StaticCache,
)

from surgery.modeling.llamba import LlambaConfig, LlambaForCausalLM
from surgery.records.plan import Plan, Start
from surgery.splicing.splice import splice

VOCABULARY = 40
COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "initializer_range": 0.4}
COMMON |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


def mamba2(**more: Any) -> Any:
    fields = {"num_heads": 6, "head_dim": 8, "n_groups": 2, "state_size": 8, "chunk_size": 16, **COMMON, **more}
    return Mamba2ForCausalLM(Mamba2Config(**fields))


def mamba(**more: Any) -> Any:
    return MambaForCausalLM(MambaConfig(**{"state_size": 6, **COMMON, **more}))


def falcon_mamba(**more: Any) -> Any:
    return FalconMambaForCausalLM(FalconMambaConfig(**{"state_size": 6, **COMMON, **more}))


def llamba(**more: Any) -> Any:
    ssm = {"d_state": 8, "n_v_heads": 6, "n_qk_heads": 6, "chunk_size": 16}
    names = {"hidden_size": "d_model", "num_hidden_layers": "n_layer"}
    fields = {names.get(name, name): value for name, value in COMMON.items()}
    return LlambaForCausalLM(LlambaConfig(**fields, ssm_cfg=ssm, mlp_cfg={"intermediate_size": 32}, **more))


BASES = {"mamba2": mamba2, "mamba": mamba, "falcon_mamba": falcon_mamba, "llamba": llamba}
STOCK = ("mamba2", "mamba", "falcon_mamba")  # of which transformers has a class of its own


def make_base(name: str, seed: int = 0, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """A random base of a family, in inference."""
    torch.manual_seed(seed)
    return BASES[name](**more).to(dtype).eval()


def make_hybrid(name: str, null: float | None = 0.5, seed: int = 0, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """A hybrid with grafts at five heads of two layers. more: of the plan."""
    starts = {
        "L1.H1": Start(sign=1, tau=0.8, null=null),
        "L1.H3": Start(sign=-1, tau=1.5, null=null),
        "L1.H4": Start(sign=-1, tau=1.5, null=null),
        "L0.H0": Start(sign=1, tau=0.5, null=null),
        "L0.H5": Start(sign=1, tau=0.5, null=None if null is None else null - 1),
    }
    plan = Plan(**{"sites": ("L0.H0,5", "L1.H1,3,4"), "starts": starts, "gate": 0.7, **more})
    return splice(make_base(name, seed, dtype), plan).eval()


def make_rows(batch: int = 2, length: int = 23, seed: int = 1) -> torch.Tensor:
    """Random ids, none of them padding."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decode_captured(hybrid: Any, ids: torch.Tensor, prompt: int = 6) -> torch.Tensor:
    """Logits from a static cache, a token at a time behind the prompt, by one graph for all tokens, as a CUDA graph would be:
    where a host waits for a number, there is no such graph."""
    cache = hybrid.with_room(StaticCache(config=hybrid.config, max_cache_len=ids.shape[1] + 8), ids.shape[1] + 8)
    parts, graphs = [hybrid(ids[:, :prompt], past_key_values=cache, use_cache=True).logits], CompileCounter()
    torch._dynamo.reset()
    step = torch.compile(hybrid.forward, backend=graphs, fullgraph=True)
    parts += [step(ids[:, i, None], past_key_values=cache, use_cache=True).logits for i in range(prompt, ids.shape[1])]
    assert graphs.frame_count == 1
    return torch.cat(parts, 1)
