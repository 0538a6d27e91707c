"""vLLM's Mamba-2 with grafts: the model around the mixers."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator, MambaStateDtypeCalculator
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMambaPrefixCaching, SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from surgery.serving.limits import grafts_of, is_layer_graft
from surgery.serving.patches import FROM_BASE, Patched
from surgery.serving.vllm_layer_graft import ServedLayerGraft
from surgery.serving.vllm_mixer import HybridMixer2, Mixer2, convolved_channels, mixer_arguments, state_shape

HANDED_ON = ("hidden_states", "residual")


class Block(nn.Module):
    """Norm and mixer; the residual stream is handed on beside what is to be added to it, as everywhere in vLLM."""

    def __init__(self, vllm_config: VllmConfig, layer: int, prefix: str):
        super().__init__()
        config = vllm_config.model_config.hf_config
        spec = grafts_of(config).get(layer)
        name = f"{prefix}.mixer"
        self.mixer: Any
        if spec is None:
            self.mixer = Mixer2(**mixer_arguments(config, vllm_config), prefix=name)
        elif is_layer_graft(spec):
            self.mixer = ServedLayerGraft(config, spec, vllm_config, name)
        else:
            self.mixer = HybridMixer2(config, spec, vllm_config, name)
        self.whole = bool(getattr(self.mixer, "whole", False))  # a layer graft with its donor's norms and MLP
        self.norm: Any = None if self.whole else RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.takes_positions = isinstance(self.mixer, ServedLayerGraft)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        norm = self.mixer.input_layernorm if self.norm is None else self.norm
        if residual is None:
            residual, hidden = hidden, norm(hidden)
        else:
            hidden, residual = norm(hidden, residual)
        mixed = self.mixer(positions, hidden) if self.takes_positions else self.mixer(hidden)
        if self.whole:
            mixed, residual = self.mixer.post_attention_layernorm(mixed, residual)
            mixed = self.mixer.mlp(mixed)
        return mixed, residual


@support_torch_compile
class ServedMamba2Model(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: Block(vllm_config, int(prefix.rpartition(".")[2]), prefix),
            prefix=f"{prefix}.layers",
        )
        self.norm_f = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Tensor | None = None
    ) -> Any:
        """In a pipeline each process has some of the layers, and hands on what they gave to the next."""
        residual = None
        if not get_pp_group().is_first_rank:
            hidden, residual = (intermediate_tensors[name] for name in HANDED_ON)
        else:
            hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers[self.start_layer : self.end_layer]:
            hidden, residual = layer(positions, hidden, residual)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors(dict(zip(HANDED_ON, (hidden, residual), strict=True)))
        hidden, _ = self.norm_f(hidden, residual)
        return hidden


class ServedMamba2ForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsPP, SupportsMambaPrefixCaching):
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_substr={".A_log": ".A"})

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.backbone = ServedMamba2Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "backbone"))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.backbone.embeddings)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(list(HANDED_ON), config.hidden_size)
        model = vllm_config.model_config
        self.patched = Patched.read(model.model, model.revision)
        # vLLM's loader reads the folder that it was given, and then these.
        self.secondary_weights = [] if self.patched is None else [
            DefaultModelLoader.Source(self.patched.place, self.patched.revision, prefix=FROM_BASE)
        ]  # fmt: skip

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        cache = vllm_config.cache_config
        return MambaStateDtypeCalculator.mamba2_state_dtype(
            vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Of the layer that keeps the most: vLLM's pages hold any layer's."""
        config = vllm_config.model_config.hf_config
        channels = max(convolved_channels(config, spec) for spec in config.grafts)
        return state_shape(config, channels, vllm_config.num_speculative_tokens)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        return MambaStateCopyFuncCalculator.mamba2_state_copy_func()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.backbone.embeddings(input_ids)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None, **_: Any,
    ) -> Any:  # fmt: skip
        return self.backbone(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        if self.patched is not None:
            weights = self.patched.joined(weights, self.config.tie_word_embeddings)
        return AutoWeightsLoader(self).load_weights(self._joined(weights), mapper=self.hf_to_vllm_mapper)

    def _joined(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors, those of a head graft's projections and convolution as rows of their mixer's."""
        parts_of: dict[str, list[str]] = {}
        for layer, spec in grafts_of(self.config).items():
            if not is_layer_graft(spec):
                parts_of |= _parts(f"backbone.layers.{layer}.mixer", self.config)
        whole_of = {part: whole for whole, parts in parts_of.items() for part in parts}
        waiting: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name not in whole_of:
                yield name, tensor
                continue
            waiting[name] = tensor
            whole = whole_of[name]
            if all(part in waiting for part in parts_of[whole]):
                first, *others = (waiting.pop(part) for part in parts_of[whole])
                # in_proj: gate, x, B, C, then queries and keys, then dt.
                after = self.config.num_heads if ".in_proj." in whole else 0
                yield whole, torch.cat([first[: len(first) - after], *others, first[len(first) - after :]])
        if waiting:
            raise ValueError(f"the checkpoint is not whole: {', '.join(sorted(waiting))} came without what belongs to it")


def _parts(mixer: str, config: Any) -> dict[str, list[str]]:
    """Of what names each of a mixer's widened tensors is put together."""
    kinds = ["weight", *(["bias"] if config.use_bias else [])]
    parts = {
        f"{mixer}.in_proj.{kind}": [f"{mixer}.{name}.{kind}" for name in ("in_proj", "graft.q_proj", "graft.k_proj")]
        for kind in kinds
    }
    for kind in ("weight", *(["bias"] if config.use_conv_bias else [])):
        parts[f"{mixer}.conv1d.{kind}"] = [f"{mixer}.conv1d.{kind}", f"{mixer}.graft.qk_conv.{kind}"]
    return parts
