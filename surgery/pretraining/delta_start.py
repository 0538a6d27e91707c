"""How Gated DeltaNet's mixers start, for training from scratch.

transformers gives every linear layer the same small weights, as fits a model that is then read from a checkpoint, and in
Qwen3-Next decays after which most heads remember nothing beyond one token (exp(-10) and less): no retrieval is learnt from
there. Here projections keep the size of what they are given, and decays start as in Mamba-2 and in fla: A between 1 and 16, and
time steps between .001 and .1.
"""

import math
from typing import Any

import torch
from torch import nn

STEPS = 0.001, 0.1


@torch.no_grad()
def start_delta_mixers(model: Any) -> None:
    """Give the Gated DeltaNet mixers of a fresh model their first weights. Other mixers, and what is random in them, stay."""
    for mixer in (module for module in model.modules() if hasattr(module, "num_v_heads") and hasattr(module, "A_log")):
        projections = [module for module in mixer.children() if isinstance(module, nn.Linear)]
        for projection in projections:
            nn.init.kaiming_uniform_(projection.weight, a=math.sqrt(5))
        out = next(module for name, module in mixer.named_children() if name in ("out_proj", "o_proj"))
        out.weight /= math.sqrt(model.config.num_hidden_layers)
        mixer.A_log.uniform_(1, 16).log_()
        least, most = map(math.log, STEPS)
        step = torch.empty_like(mixer.dt_bias).uniform_(least, most).exp()
        mixer.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus of which it is
