"""How mixers of linear attention start, for training from scratch.

transformers gives every linear layer the same small weights, as fits a model that is then read from a checkpoint, and some
mixers a start at which nothing is remembered or written: Qwen3-Next's heads decay by exp(-10) and less from token to token,
xLSTM's write with exp(-10). No retrieval is learnt from there. Here projections keep the size of what they are given, and

- Gated DeltaNet decays as Mamba-2 does and as in fla: A between 1 and 16, and time steps between .001 and .1;
  transformers lets Kimi Delta Attention begin so by itself;
- xLSTM writes with a strength about 1, and its heads forget between a third and a four-hundredth of what they hold. Its first
  layer forgets sooner and, where queries and keys have biases, begins as an average of the last few tokens, as a convolution
  would: there is none, and what the second layer could retrieve has to be gathered first;
- Mamba-2 inside hybrids (Granite 4, Nemotron-H) starts its convolutions with weights as small as those of its projections, so
  that they gather nothing, and its heads may forget within a token. Convolutions and decay start as in Mamba-2's own class;
- MiniMax's decays are fixed by its class.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

STEPS = 0.001, 0.1
FORGET = 1.0, 6.0  # of the first head, and of the last: the argument of the sigmoid
SOON = -1.5, 1.5  # in the first layer


@torch.no_grad()
def start_mixers(model: Any) -> None:
    """Give the mixers of linear attention in a fresh model their first weights. Others, and what is random in them, stay."""
    layers = 0
    for mixer in model.modules():
        if hasattr(mixer, "num_v_heads") and hasattr(mixer, "A_log"):
            _start_projections(mixer, model.config)
            _start_decay(mixer)
        elif hasattr(mixer, "mlstm_backend"):
            _start_projections(mixer, model.config)
            _start_gates(mixer, first=not layers)
            layers += 1
        elif hasattr(mixer, "conv1d") and hasattr(mixer, "dt_bias") and not isinstance(mixer, Mamba2Mixer):
            nn.init.kaiming_uniform_(mixer.conv1d.weight, a=math.sqrt(5))
            _start_decay(mixer)
        elif hasattr(mixer, "slope_rate") or hasattr(mixer, "forget_gate"):
            _start_projections(mixer, model.config)


def _start_projections(mixer: nn.Module, config: Any) -> None:
    for projection in (module for module in mixer.modules() if isinstance(module, nn.Linear)):
        nn.init.kaiming_uniform_(projection.weight, a=math.sqrt(5))
    out: Any = next(module for name, module in mixer.named_children() if name in ("out_proj", "o_proj"))
    out.weight /= math.sqrt(config.num_hidden_layers)


def _start_decay(mixer: Any) -> None:
    mixer.A_log.uniform_(1, 16).log_()
    least, most = map(math.log, STEPS)
    step = torch.empty_like(mixer.dt_bias).uniform_(least, most).exp()
    mixer.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus of which it is


def _start_gates(mixer: Any, first: bool) -> None:
    config = mixer.config
    fused = config.weight_mode == "fused"
    write, forget = mixer.ifgate_preact.bias.chunk(2) if fused else (mixer.igate_preact.bias, mixer.fgate_preact.bias)
    write.zero_()
    forget.copy_(torch.linspace(*(SOON if first else FORGET), config.num_heads))
    if first and config.use_bias:
        for bias in (mixer.qkv_opreact.bias[: 2 * mixer.qk_dim],) if fused else (mixer.q.bias, mixer.k.bias):
            bias.fill_(1)
