"""Llamba (arXiv 2502.14458): Llama's block with a discrete Mamba-2 (MOHAWK, arXiv 2408.10189) in the place of attention.

transformers has no such class: base and hybrid are one class here. With u_t the normalised input of a layer, * a causal
convolution over time, channel by channel:

    x, B, C, z, l = in_proj(u);   x, B, C <- (x, B, C) * w + b          no activation; B and C per head
    S_t = exp(-softplus(l_t)) S_{t-1} + x_t B_t^T                       (P x N), S_{-1} = 0
    y_t = S_t C_t + D x_t
    out = out_proj(y silu(z + z_bias))                                  no norm
    h <- h + out;   h <- h + down_proj(silu(gate_proj(norm h)) up_proj(norm h))

"Discrete" because the decay is projected from the input and no time step multiplies x. It is the scan of Mamba-2 with A = -1,
dt = softplus(l) and x / dt for x. With no time step to scale what is written, the dual graft of a head is

    y_t = sigma sum_{s<=t} softmax_s(sigma tau C'_t . B'_s) x_s + D x_t
"""

# What is known of the published models, and from where. Read in cartesia-ai/edge (cartesia-pytorch: Llamba/llamba.py,
# configuration_llamba.py, modeling_llama.py, mixers/discrete_mamba2.py): the configuration's fields and defaults, the order
# x, B, C, z, l of in_proj, the names of all modules, that z_bias exists only where in_proj has no bias, that a tied head has no
# tensor of its own, that resid_dropout is never applied, that the norms within a block have 1e-5 whatever norm_epsilon is (it
# is 1e-5). Its MLX layer (cartesia-mlx: layers/ssd/llamba_ssd.py) and the importer of Fast-LLM agree. Read on the Hub:
# config.json of Llamba-3B, word by word, and the size of its safetensors file, which is that of these tensors in float32 with
# the head tied. Only from others' programs: 16 layers of 2048 and a tied head for 1B. Not checked: the published weights
# themselves, and config.json of 8B (the defaults below are those that Cartesia documents: 32 layers of 4096).

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PretrainedConfig
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mamba2.modeling_mamba2 import Mamba2RMSNorm

from .graft import SILU, Streams, convolve
from .hybrid import Family, HybridConfig
from .mamba2 import SSDMixer
from .packing import Packing
from .reference import result_dtype
from .ssm import HybridBackbone, SSMLanguageModel, gated, normed, time_step

try:
    from surgery.kernels.ssd import ssd_scan, ssd_step
except ImportError:
    from .reference import ssd_scan, ssd_step  # type: ignore[assignment]

MLP = {"intermediate_size": 14336, "bias": False, "act_fn": "silu"}
SSM = {
    "d_state": 64,
    "n_v_heads": 32,
    "n_qk_heads": 32,
    "expand": 1,
    "d_conv": 4,
    "chunk_size": 128,
    "activation": "identity",
    "bias": False,
    "conv_bias": True,
}

# The least dt. softplus underflows to 0 for l < -104, and x / dt would overflow long before. With this bound x may be as large
# as 1e26, while a state that nothing should decay loses a millionth of itself in a million tokens.
LEAST = 1e-12


class LlambaConfig(HybridConfig, PretrainedConfig):
    """The published configuration, read and written as it is, with `grafts` (graft.py says what an entry holds)."""

    model_type = "llamba"
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "layer_norm_epsilon": "norm_epsilon",
        "tie_word_embeddings": "tie_embeddings",
    }

    vocab_size: int = 128256
    d_model: int = 4096
    n_layer: int = 32
    tie_embeddings: bool = False
    pad_vocab_size_multiple: int = 8
    lm_head_bias: bool = False
    resid_dropout: float = 0.0
    norm_epsilon: float = 1e-5
    mlp_cfg: dict | None = None
    ssm_cfg: dict | None = None
    initializer_range: float = 0.02
    grafts: list | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.mlp_cfg, self.ssm_cfg = MLP | (self.mlp_cfg or {}), SSM | (self.ssm_cfg or {})
        for name, section, known in (("mlp_cfg", self.mlp_cfg, MLP), ("ssm_cfg", self.ssm_cfg, SSM)):
            if unknown := sorted(set(section) - set(known)):
                raise ValueError(f"the field '{unknown[0]}' of a Llamba's {name} is not known")
        super().__post_init__(**kwargs)
        multiple = self.pad_vocab_size_multiple  # the embedding's rows are padded to one
        self.vocab_size, self.pad_vocab_size_multiple = -(-self.vocab_size // multiple) * multiple, 1  # resized, it may be none
        heads, pairs = self.ssm_cfg["n_v_heads"], self.ssm_cfg["n_qk_heads"]
        if (self.ssm_cfg["expand"] * self.hidden_size) % heads or heads % pairs:
            raise ValueError(f"a Llamba of {self.hidden_size} channels cannot have {heads} heads with {pairs} pairs of B and C")
        if self.ssm_cfg["activation"] not in ("identity", *SILU):
            raise ValueError(f"a Llamba's convolution has no activation or SiLU, not '{self.ssm_cfg['activation']}'")

    @property
    def layer_types(self) -> list[str]:
        """What a cache holds."""
        return ["linear_attention"] * self.num_hidden_layers


class LlambaMixer(SSDMixer, nn.Module):
    """A discrete Mamba-2. Keys are B, queries C, values x; Streams.decay is softplus(l)."""

    gate_first = has_time_step = False

    def __init__(self, config: LlambaConfig, layer_idx: int):
        super().__init__()
        ssm: Any = config.ssm_cfg
        self.layer_idx, self.hidden_size = layer_idx, config.hidden_size
        self.num_heads, self.n_groups, self.ssm_state_size = ssm["n_v_heads"], ssm["n_qk_heads"], ssm["d_state"]
        self.intermediate_size = ssm["expand"] * config.hidden_size
        self.head_dim, self.chunk_size = self.intermediate_size // self.num_heads, ssm["chunk_size"]
        self.conv_dim = self.intermediate_size + 2 * self.n_groups * self.ssm_state_size
        self.activation, bias, taps = ssm["activation"], ssm["bias"], ssm["d_conv"]
        self.in_proj = nn.Linear(config.hidden_size, self.conv_dim + self.intermediate_size + self.num_heads, bias=bias)
        self.z_bias = None if bias else nn.Parameter(torch.zeros(self.intermediate_size))  # else z has one already
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, taps, groups=self.conv_dim, bias=ssm["conv_bias"], padding=taps - 1
        )
        self.D = nn.Parameter(torch.ones(self.num_heads))
        self.out_proj = nn.Linear(self.intermediate_size, config.hidden_size, bias=bias)

    def project(
        self, hidden: Tensor, cache: Cache | None = None, mask: Tensor | None = None, packing: Packing | None = None
    ) -> Streams:
        xBC, gate, decay = self.in_proj(hidden).split([self.conv_dim, self.intermediate_size, self.num_heads], dim=-1)
        if self.z_bias is not None:
            gate = gate + self.z_bias
        xBC = convolve(xBC, self.conv1d, self.activation, cache, self.layer_idx, mask, packing)
        decay = time_step(decay)
        decay = decay if mask is None else decay * mask[..., None]  # padding lets no state decay
        return Streams(*self.split_heads(xBC), gate, decay=decay)

    def scan(self, streams: Streams, cache: Cache | None = None, packing: Packing | None = None) -> Tensor:
        assert streams.decay is not None
        x, dt = streams.x, streams.decay.clamp_min(LEAST)
        # In float32 at least: x / dt would be rounded coarsely in bfloat16 and overflow in float16.
        B, C, write = streams.k.to(dt.dtype), streams.q.to(dt.dtype), x.to(dt.dtype) / dt[..., None]
        A = dt.new_full(dt.shape[-1:], -1.0)
        state: Any = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        if state is not None and x.shape[1] == 1:
            y = ssd_step(state, write[:, 0], dt[:, 0], A, B[:, 0], C[:, 0])[:, None]
        else:
            y, state = ssd_scan(write, dt, A, B, C, None, state, packing=packing, chunk_size=self.chunk_size)
            if cache is not None:
                cache.update_recurrent_state(state, layer_idx=self.layer_idx)
        return (y + self.D[:, None] * x).to(result_dtype(x))

    def finish(self, y: Tensor, gate: Tensor) -> Tensor:
        return gated(self.out_proj, y.flatten(-2), gate)


class LlambaBlock(GradientCheckpointingLayer):
    """Norm, mixer, residual; norm, MLP, residual."""

    def __init__(self, config: LlambaConfig, layer_idx: int):
        super().__init__()
        self.mixer = LlambaMixer(config, layer_idx)
        self.input_layernorm = Mamba2RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.post_attention_layernorm = Mamba2RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        mlp: Any = config.mlp_cfg
        given = {"intermediate_size": mlp["intermediate_size"], "hidden_act": mlp["act_fn"], "mlp_bias": mlp["bias"]}
        self.mlp = LlamaMLP(SimpleNamespace(hidden_size=config.hidden_size, **given))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        hidden_states = hidden_states + self.mixer(normed(self.input_layernorm, hidden_states), **kwargs)
        return hidden_states + self.mlp(normed(self.post_attention_layernorm, hidden_states))


class LlambaPreTrainedModel(PreTrainedModel):
    """What both classes share."""

    config_class = LlambaConfig
    base_model_prefix = "backbone"
    _input_embed_layer = "embedding"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules = ["LlambaBlock"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LlambaMixer):
            init.ones_(module.D)
            init.kaiming_uniform_(module.conv1d.weight, a=math.sqrt(5))
            if module.z_bias is not None:
                init.zeros_(module.z_bias)


class LlambaModel(HybridBackbone, LlambaPreTrainedModel):
    """The backbone."""

    last_norm = "final_layernorm"
    _no_split_modules = ["LlambaBlock"]

    def __init__(self, config: LlambaConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlambaBlock(config, i) for i in range(config.num_hidden_layers))
        self.gradient_checkpointing = False
        self.final_layernorm = Mamba2RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.put_grafts()
        self.post_init()


class LlambaForCausalLM(SSMLanguageModel, LlambaPreTrainedModel, GenerationMixin):
    """The language model: base (no grafts) and hybrid."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embedding.weight"}
    _no_split_modules = ["LlambaBlock"]

    def __init__(self, config: LlambaConfig):
        super().__init__(config)
        self.backbone = LlambaModel(config)
        bias = config.lm_head_bias and not config.tie_word_embeddings  # a tied head is the embedding alone
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=bias)
        self.post_init()


FAMILY = Family(LlambaForCausalLM, LlambaForCausalLM).register(LlambaModel)
