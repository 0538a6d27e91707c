"""Fields that published configurations carry and that change nothing, and the values at which they change nothing.

They come from mamba_ssm by way of conversion scripts (state-spaces/mamba-130m-hf), from earlier releases of transformers
(`rms_norm` was a field of Mamba-2 up to 5.14) and from the tools that models are trained with. transformers reads none of them.
A field that is neither here, nor in a family's own list, nor at its default is refused: it could change what a model computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

Holds = Callable[[Any, Any], bool]  # of a value and the configuration that holds it


@dataclass(frozen=True)
class Inert:
    """Fields that change nothing where `holds`. only: the values at which they do, for a refusal, "" if these are all.
    families: the model types whose configurations may carry them, all of them where there is none."""

    names: str
    why: str
    holds: Holds = lambda value, config: True
    only: str = ""
    families: tuple[str, ...] = ()


def _same(name: str) -> Holds:
    return lambda value, config: value == getattr(config, name)


def _flag(value: Any, config: Any) -> bool:
    return isinstance(value, bool)


def _empty(value: Any, config: Any) -> bool:
    return value is None or value in ({}, [], 0)


TABLE = (
    Inert(
        "rms_norm", "all norms of these models are RMSNorm, and Mamba-2 has one beside its gate; mamba_ssm's models without "
        "have LayerNorm, or no gated norm", lambda value, config: value is True, "True",
    ),
    Inert(
        "norm_before_gate", "transformers 4.44 wrote True into Codestral-Mamba, a wrong default of its configuration (its pull "
        "request 32686); its forward has always multiplied by the gate first, as mamba_ssm did in training",
        _flag, "True or False", ("mamba2",),
    ),
    Inert(
        "fused_add_norm use_mambapy use_falcon_mambapy use_associative_scan use_mamba_kernels", "a choice among kernels that "
        "compute the same", _flag, "True or False",
    ),
    Inert("d_model", "mamba_ssm's name of hidden_size", _same("hidden_size"), "hidden_size"),
    Inert("n_layer", "mamba_ssm's name of num_hidden_layers", _same("num_hidden_layers"), "num_hidden_layers"),
    Inert(
        "tie_embeddings", "mamba_ssm's name of tie_word_embeddings", _same("tie_word_embeddings"), "tie_word_embeddings",
    ),
    Inert(
        "ssm_cfg attn_cfg attn_layer_idx d_intermediate", "mamba_ssm's further arguments, empty: its defaults, neither "
        "attention nor an MLP", _empty, "an empty one",
    ),
    Inert(
        "d_inner dt_rank pad_vocab_size_multiple", "sizes that are said again, not always rightly (d_inner of mamba-370m-hf is "
        "160): intermediate_size, time_step_rank and vocab_size are read, and a tensor of another shape is refused",
    ),
    Inert(
        "intermediate_size", "of Codestral-Mamba: Mamba-2's is num_heads * head_dim, and a tensor of another shape is refused",
        families=("mamba2",),
    ),
    Inert("time_step_init_scheme time_step_scale", "Mamba-1's initialisation", families=("mamba2",)),
    Inert("lm_head_prenorm", "the norm before Llamba's head", lambda value, config: value == "rms", "'rms'", ("llamba",)),
    Inert(
        "max_position_embeddings max_sequence_length max_seq_len model_max_length", "a length to train or serve at: these "
        "models have no positions",
    ),
    Inert(
        "_attn_implementation _attn_implementation_autoset attn_implementation", "which attention: transformers takes it out "
        "of the configuration, or there is none",
    ),
    Inert("gradient_checkpointing torchscript use_bfloat16 _from_model_config tokenizer_class", "how a model is run, or kept"),
    Inert("quantization_config", "null, as trainers leave it", lambda value, config: value is None, "None"),
    Inert(
        "id2label label2id num_labels problem_type finetuning_task task_specific_params pruned_heads", "of other tasks than "
        "the next token",
    ),
    Inert("unsloth_fixed unsloth_version transformers.js_config", "what a tool noted for itself"),
)  # fmt: skip


def entry_of(name: str, config: PreTrainedConfig) -> Inert | None:
    """What the table says of a field of a configuration, which may be a hybrid's."""
    model_type = config.model_type.removesuffix("_hybrid")
    fitting = (entry for entry in TABLE if name in entry.names.split())
    return next((entry for entry in fitting if not entry.families or model_type in entry.families), None)
