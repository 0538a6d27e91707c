"""The published configurations of the models that recipes/ is for, and how they are cut to a size that a test can afford.

tests/configurations/NAME.json goes with recipes/NAME.yaml: `config` as the repository's config.json has it, `stored` the dtype
of its weights, `parameters` how many numbers these are, `source` where it is all from, and `unchecked` what could not be
compared with the repository. Sizes alone are cut; every option stays as it was published.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIGURATIONS = Path(__file__).parent.parent / "tests" / "configurations"
DEPTH = ("num_hidden_layers", "n_layer")
# By model_type ("" for the original layout): widths that tests can afford. Ratios that an option hangs on stay: groups divide
# heads, heads divide widths. Mamba-2's original layout keeps its heads of 64 with 128 states, which its files do not name.
NARROW: dict[str, dict[str, Any]] = {
    "": {"d_model": 128},
    "mamba": {"d_inner": 64, "d_model": 32, "hidden_size": 32, "intermediate_size": 64, "time_step_rank": 2},
    "falcon_mamba": {"hidden_size": 32, "intermediate_size": 64, "time_step_rank": 2},
    "mamba2": {"head_dim": 8, "hidden_size": 64, "intermediate_size": 128, "num_heads": 16, "state_size": 16},
    "llamba": {
        "d_model": 64, "mlp_cfg": {"intermediate_size": 96}, "ssm_cfg": {"d_state": 16, "n_v_heads": 4, "n_qk_heads": 4},
    },
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 1},
    "zamba2": {
        "adapter_rank": 8, "attention_head_dim": 32, "attention_hidden_size": 64, "hidden_size": 32, "intermediate_size": 48,
        "kv_channels": 16, "mamba_d_state": 16, "mamba_headdim": 16, "n_mamba_heads": 4, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_query_groups": 2,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A file of CONFIGURATIONS."""

    name: str
    repository: str
    source: str
    unchecked: dict[str, str]
    stored: str
    parameters: int
    config: dict[str, Any]

    @property
    def layers(self) -> int:
        return next(self.config[name] for name in DEPTH if name in self.config)


def names() -> list[str]:
    return sorted(path.stem for path in CONFIGURATIONS.glob("*.json"))


def published(name: str) -> Published:
    """Raises FileNotFoundError for a model without a file."""
    return Published(name, **json.loads((CONFIGURATIONS / f"{name}.json").read_text()))


def is_original(config: dict[str, Any]) -> bool:
    """Whether a configuration has the layout of state-spaces, which names no model_type."""
    return "model_type" not in config


def cut(
    config: dict[str, Any], layers: int | None = None, vocabulary: int | None = None, narrow: bool = False
) -> dict[str, Any]:
    """A configuration of fewer layers, of a smaller vocabulary, or with the widths of NARROW; the rest as it is. A model whose
    layers are of several kinds keeps the kinds in turns."""
    fields = json.loads(json.dumps(config))
    if narrow:
        for name, value in NARROW[fields.get("model_type", "")].items():
            fields[name] = fields[name] | value if isinstance(value, dict) else value
    if layers is not None:
        fields |= {name: layers for name in DEPTH if name in fields}
        if "layers_block_type" in fields:
            kinds = list(dict.fromkeys(fields["layers_block_type"]))
            fields["layers_block_type"] = [kinds[i % len(kinds)] for i in range(layers)]
            fields["hybrid_layer_ids"] = [i for i, kind in enumerate(fields["layers_block_type"]) if kind == "hybrid"]
    if vocabulary is not None:
        fields["vocab_size"] = vocabulary
        # An id beyond the vocabulary would be refused: Llama's special tokens are its last ones.
        special = [name for name in ("bos_token_id", "eos_token_id", "pad_token_id") if fields.get(name) is not None]
        fields |= {name: min(fields[name], vocabulary - 1) for name in special}
    return fields
