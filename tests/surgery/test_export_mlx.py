"""Folders of nemotron_h in mlx-lm: the fields that it asks for, and its own answers."""

import json
import os
from pathlib import Path

import pytest

from surgery import export, load, splice
from surgery.exporting.engines import check_engines
from surgery.exporting.folder import Exported
from surgery.records.plan import Plan
from surgery.serving import proving
from tests.models import ROOT

PYTHON = Path(os.environ.get("SURGERY_MLX_PYTHON", ROOT / ".venv-mlx/bin/python"))
# What mlx_lm/models/nemotron_h.py (0.32) has no default for.
ASKED = """
    model_type vocab_size hidden_size intermediate_size max_position_embeddings num_attention_heads num_key_value_heads
    attention_bias mamba_num_heads mamba_head_dim mamba_proj_bias ssm_state_size conv_kernel n_groups mlp_bias
    layer_norm_epsilon use_bias use_conv_bias
""".split()


@pytest.fixture(scope="module")
def hybrid():
    base = load(ROOT / "checkpoints" / "tiny-mamba2")
    return splice(base, Plan(kind="layer", sites=("L0", "L2"), width=32))


def test_the_folder_has_every_field_that_it_asks_for(hybrid, tmp_path):
    export(hybrid, tmp_path / "out", format="nemotron_h", verify="tensors")
    assert {*ASKED} <= {*json.loads((tmp_path / "out" / "config.json").read_text())}
    assert check_engines(["mlx_lm"], "nemotron_h", "/bin/true") == {"mlx_lm": Path("/bin/true")}


@pytest.mark.mlx_lm
@pytest.mark.skipif(not PYTHON.exists(), reason="no environment with mlx-lm: `make serving-mlx` makes one")
def test_mlx_lm_gives_the_same_answers(hybrid, tmp_path):
    """Alone, and of requests that join and leave."""
    out = tmp_path / "out"
    export(hybrid, out, format="nemotron_h", engines=["mlx_lm"], engine_python=PYTHON)
    (proof,) = Exported.read(out / "export.json", unsealed="refuse").engines
    assert proof.tokens == 2 * sum(proving.NEW - 3 * i for i in range(len(proving.LENGTHS)))
    assert proof.difference <= proof.tolerance
