"""Llamba (arXiv 2502.14458): Llama's block with a discrete Mamba-2 (MOHAWK, arXiv 2408.10189) in the place of attention.

transformers has no such class. With u_t the normalised input of a layer, * a causal convolution over time, channel by channel:

    x, B, C, z, l = in_proj(u);   x, B, C <- (x, B, C) * w + b          no activation; B and C per head
    S_t = exp(-softplus(l_t)) S_{t-1} + x_t B_t^T                       (P x N), S_{-1} = 0
    y_t = S_t C_t + D x_t
    out = out_proj(y silu(z + z_bias))                                  no norm
    h <- h + out;   h <- h + down_proj(silu(gate_proj(norm h)) up_proj(norm h))

"Discrete" because the decay is projected from the input and no time step multiplies x. It is the scan of Mamba-2 with A = -1,
dt = softplus(l) and x / dt for x.
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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PretrainedConfig
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from surgery.hybrids.dual import DualMixer, SSDProjected
from surgery.hybrids.parts import RMSNorm, gated, gather_positions, normed, time_step
from surgery.hybrids.spliced import classes_of, register
from surgery.hybrids.ssm_model import HybridBackbone, HybridLanguageModel
from surgery.hybrids.stock_hybrid import InStock, StockHybrid, WithoutHead
from surgery.kernels.conv import SILU
from surgery.kernels.functions import result_dtype
from surgery.kernels.mixing import ssd_matrix
from surgery.kernels.packing import Packing

MLP = {"intermediate_size": 14336, "bias": False, "act_fn": "silu"}
SSM = {"d_state": 64, "n_v_heads": 32, "n_qk_heads": 32, "expand": 1, "d_conv": 4, "chunk_size": 128, "activation": "identity",
       "bias": False, "conv_bias": True}  # fmt: skip

# The least dt. softplus underflows to 0 for l < -104, and x / dt would overflow long before. With this bound x may be as large
# as 1e26, while a state that nothing should decay loses a millionth of itself in a million tokens.
LEAST = 1e-12


def _filled(name: str, defaults: dict[str, Any], given: dict[str, Any] | None) -> dict[str, Any]:
    """`given` over the defaults. Raises ValueError for a field that nothing here would obey."""
    if unknown := sorted(set(given or {}) - set(defaults)):
        raise ValueError(f"the field '{unknown[0]}' of a Llamba's {name} is not known")
    return defaults | (given or {})


def _inside(section: str, field: str) -> Any:
    """An attribute that lies in a section of the configuration."""
    return property(
        lambda self: getattr(self, section)[field], lambda self, value: getattr(self, section).__setitem__(field, value)
    )


class LlambaConfig(PretrainedConfig):
    """The published configuration: read and written as it is, with what other families call its fields beside them. A base has
    no `grafts`; a hybrid's are as in mamba2.py."""

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

    num_heads = _inside("ssm_cfg", "n_v_heads")
    n_groups = _inside("ssm_cfg", "n_qk_heads")  # of B and C
    state_size = _inside("ssm_cfg", "d_state")
    expand = _inside("ssm_cfg", "expand")
    conv_kernel = _inside("ssm_cfg", "d_conv")
    chunk_size = _inside("ssm_cfg", "chunk_size")
    conv_act = _inside("ssm_cfg", "activation")
    use_bias = _inside("ssm_cfg", "bias")
    use_conv_bias = _inside("ssm_cfg", "conv_bias")
    intermediate_size = _inside("mlp_cfg", "intermediate_size")  # of the MLP
    hidden_act = _inside("mlp_cfg", "act_fn")
    mlp_bias = _inside("mlp_cfg", "bias")

    def __post_init__(self, **kwargs: Any) -> None:
        self.mlp_cfg, self.ssm_cfg = _filled("mlp_cfg", MLP, self.mlp_cfg), _filled("ssm_cfg", SSM, self.ssm_cfg)
        kwargs.pop("layer_types", None)  # versions up to 0.20 wrote what their caches held
        super().__post_init__(**kwargs)
        self.grafts = self.grafts or []
        self.auto_map = classes_of("llamba", "Llamba")
        multiple = self.pad_vocab_size_multiple  # the embedding's rows are padded to one
        self.vocab_size = -(-self.vocab_size // multiple) * multiple
        if (self.expand * self.hidden_size) % self.num_heads or self.num_heads % self.n_groups:
            raise ValueError(
                f"{self.expand * self.hidden_size} channels in {self.num_heads} heads with {self.n_groups} pairs of B and C"
            )
        if self.conv_act not in ("identity", *SILU):
            raise ValueError(f"a Llamba's convolution has no activation or SiLU, not '{self.conv_act}'")

    @property
    def layer_types(self) -> list[str]:
        """What a cache holds."""
        return ["linear_attention"] * self.num_hidden_layers

    @property
    def head_dim(self) -> int:
        return self.expand * self.hidden_size // self.num_heads


class LlambaMixer(InStock, DualMixer, nn.Module):
    """A discrete Mamba-2. Keys are B, queries C, values x."""

    def __init__(self, config: LlambaConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim, self.n_groups = config.num_heads, config.head_dim, config.n_groups
        self.ssm_state_size, self.chunk_size = config.state_size, config.chunk_size
        self.intermediate_size = self.num_heads * self.head_dim
        self.conv_dim = self.intermediate_size + 2 * self.n_groups * self.ssm_state_size
        self.conv_kernel_size, self.activation = config.conv_kernel, config.conv_act
        self.act = nn.Identity()  # what is no SiLU
        size = self.conv_dim + self.intermediate_size + self.num_heads
        self.in_proj = nn.Linear(config.hidden_size, size, bias=config.use_bias)
        # Where in_proj has a bias, z has one already.
        self.z_bias = None if config.use_bias else nn.Parameter(torch.zeros(self.intermediate_size))
        taps = self.conv_kernel_size
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, taps, groups=self.conv_dim, bias=config.use_conv_bias, padding=taps - 1
        )
        self.D = nn.Parameter(torch.ones(self.num_heads))
        self.out_proj = nn.Linear(self.intermediate_size, config.hidden_size, bias=config.use_bias)

    def project(
        self, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> SSDProjected:  # fmt: skip
        b, t, _ = hidden_states.shape
        xBC, gate, dt = self.in_proj(hidden_states).split([self.conv_dim, self.intermediate_size, self.num_heads], dim=-1)
        if self.z_bias is not None:
            gate = gate + self.z_bias
        # Pads are not cleared before in_proj, whose bias they would then have.
        xBC, qk = self.convolve(hidden_states, xBC, cache, attention_mask, packing, clear=True)
        state = self.n_groups * self.ssm_state_size
        x, B, C = xBC.split([self.intermediate_size, state, state], dim=-1)
        dt = time_step(dt).clamp_min(LEAST)
        B, C = (m.reshape(b, t, self.n_groups, self.ssm_state_size) for m in (B, C))
        return SSDProjected(x.reshape(b, t, self.num_heads, self.head_dim), B, C, gate, qk, dt)

    def scan(self, projected: SSDProjected, cache: Cache | None = None, packing: Packing | None = None) -> Tensor:
        D, x, dt = self.of_scanned(self.D, 0), self.of_scanned(projected.values, 2), self.of_scanned(projected.dt, -1)
        # In float32 at least: x / dt would be rounded coarsely in bfloat16 and overflow in float16.
        B, C, write = projected.keys.to(dt.dtype), projected.queries.to(dt.dtype), x.to(dt.dtype) / dt[..., None]
        y = self.run_ssd(write, dt, dt.new_full(dt.shape[-1:], -1.0), B, C, None, cache, packing)
        return (y + D[:, None] * x).to(result_dtype(x))

    def own_matrices(self, projected: SSDProjected, rows: Tensor | None, heads: Sequence[int] | None) -> Tensor:
        """D not included."""
        dt, B, C = projected.dt, projected.keys, projected.queries
        return ssd_matrix(dt, dt.new_full((self.num_heads,), -1.0), B, C, heads=heads, rows=rows, time_step=False)[0]

    def finish(self, y: Tensor, gate: Tensor) -> Tensor:
        return gated(self.out_proj, y.flatten(-2), gate)


class LlambaBlock(GradientCheckpointingLayer):
    """Norm, mixer, residual; norm, MLP, residual."""

    keeps_positions = True

    def __init__(self, config: LlambaConfig, layer_idx: int):
        super().__init__()
        self.mixer = LlambaMixer(config, layer_idx)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden_states: Tensor, positions_to_keep: Tensor | None = None, **kwargs: Any) -> Tensor:
        mixed = self.mixer(normed(self.input_layernorm, hidden_states), positions_to_keep=positions_to_keep, **kwargs)
        hidden_states = gather_positions(positions_to_keep, hidden_states) + mixed
        return hidden_states + self.mlp(normed(self.post_attention_layernorm, hidden_states))


class LlambaPreTrainedModel(PreTrainedModel):
    config_class = LlambaConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LlambaMixer):
            init.ones_(module.D)
            init.kaiming_uniform_(module.conv1d.weight, a=math.sqrt(5))
            if module.z_bias is not None:
                init.zeros_(module.z_bias)


class LlambaBackbone(HybridBackbone, LlambaPreTrainedModel):
    last_norm = "final_layernorm"

    def __init__(self, config: LlambaConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlambaBlock(config, i) for i in range(config.num_hidden_layers))
        self.gradient_checkpointing = False
        self.final_layernorm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value  # type: ignore[assignment]


class LlambaStock(LlambaPreTrainedModel, GenerationMixin):
    """What transformers would have."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embedding.weight"}
    _no_split_modules = ["LlambaBlock"]

    def __init__(self, config: LlambaConfig):
        super().__init__(config)
        self.backbone = LlambaBackbone(config)
        bias = config.lm_head_bias and not config.tie_word_embeddings  # a tied head is the embedding alone
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=bias)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.embedding = value  # type: ignore[assignment]


class LlambaForCausalLM(HybridLanguageModel, StockHybrid, LlambaStock):
    """Base and hybrid."""

    stock_mixer = mixer_class = LlambaMixer
    _no_split_modules = ["LlambaBlock", "LayerGraftBlock"]

    def _prepare_cache_for_generation(self: Any, generation_config: Any, model_kwargs: Any, *args: Any, **named: Any) -> Any:
        """transformers calls the cache `cache_params` for classes with "mamba" in their name; ours is a Mamba without it."""
        if (cache := model_kwargs.pop("cache_params", None)) is not None:
            model_kwargs["past_key_values"] = cache
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **named)
        if (cache := model_kwargs.pop("past_key_values", None)) is not None:
            model_kwargs["cache_params"] = cache


class LlambaModel(WithoutHead):
    config_class = LlambaConfig
    language_model = LlambaForCausalLM


LlambaForCausalLM.stock = LlambaForCausalLM
register(LlambaConfig, LlambaModel, LlambaForCausalLM)
