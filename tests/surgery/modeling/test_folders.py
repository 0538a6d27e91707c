"""Saved hybrids load with this package and without it, and those of version 0.30 with it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from tests.surgery.modeling.bases import BASES, make_hybrid, make_rows

FAMILIES = pytest.mark.parametrize("name", BASES)

# A process in which this package cannot be imported. It loads each folder, saves it again, and loads that.
ALONE = """
import sys
sys.modules["surgery"] = None
import torch
from transformers import AutoModel, AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    ids = torch.load(folder + "/ids.pt", weights_only=True)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        generated = model.generate(ids[:1], do_sample=False, max_new_tokens=5, pad_token_id=0, eos_token_id=None)
        model.save_pretrained(folder + "/again")
        again = AutoModelForCausalLM.from_pretrained(folder + "/again", trust_remote_code=True)(ids, use_cache=False).logits
        backbone = AutoModel.from_pretrained(folder, trust_remote_code=True)
        hidden = backbone(ids, use_cache=False).last_hidden_state
    torch.save({"logits": logits, "again": again, "generated": generated, "hidden": hidden}, folder + "/result.pt")
"""


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def test_a_folder_loads_without_this_package(tmp_path: Path) -> None:
    ids = make_rows()
    hybrids = {str(tmp_path / name): make_hybrid(name) for name in BASES}
    for folder, hybrid in hybrids.items():
        hybrid.save_pretrained(folder)
        torch.save(ids, folder + "/ids.pt")
    subprocess.run([sys.executable, "-c", ALONE, *hybrids], check=True, cwd=tmp_path, capture_output=True)
    for folder, hybrid in hybrids.items():
        result = torch.load(folder + "/result.pt", weights_only=True)
        expected = logits_of(hybrid, ids)
        torch.testing.assert_close(result["logits"], expected, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(result["again"], expected, atol=1e-9, rtol=1e-9)
        with torch.no_grad():
            hidden = hybrid.base_model(ids, use_cache=False).last_hidden_state
        torch.testing.assert_close(result["hidden"], hidden, atol=1e-9, rtol=1e-9)
        generated = hybrid.generate(ids[:1], do_sample=False, max_new_tokens=5, pad_token_id=0, eos_token_id=None)
        assert torch.equal(result["generated"], generated)


@FAMILIES
def test_a_folder_loads_with_this_package(name: str, tmp_path: Path) -> None:
    hybrid, ids = make_hybrid(name, closed_below=0.25), make_rows()
    hybrid.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(hybrid)
    torch.testing.assert_close(logits_of(loaded.eval(), ids), logits_of(hybrid, ids), atol=1e-9, rtol=1e-9)
    backbone = AutoModel.from_pretrained(tmp_path)
    assert type(backbone) is type(hybrid.base_model)


@FAMILIES
@pytest.mark.parametrize("blend", [0.7, None])
def test_a_folder_of_version_0_30_loads(name: str, blend: float | None, tmp_path: Path) -> None:
    """Its entries say `blend` and nothing of a null key; without blend there is no gate, and attention alone."""
    hybrid, ids = make_hybrid(name, null=None, gate=1.0 if blend is None else blend), make_rows()
    hybrid.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for entry in config["grafts"]:
        for field in ("gated", "null", "closed_below"):
            del entry[field]
        entry["blend"] = blend
    kind = type(hybrid).__name__.removesuffix("ForCausalLM")
    config["auto_map"] = {"AutoModelForCausalLM": f"{config['model_type']}.{kind}ForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if blend is None:
        weights = load_file(tmp_path / "model.safetensors")
        kept = {key: value for key, value in weights.items() if not key.endswith("graft.gate")}
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits_of(loaded.eval(), ids), logits_of(hybrid, ids), atol=1e-9, rtol=1e-9)


def test_a_llamba_with_other_embeddings_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    hybrid = make_hybrid("llamba")
    hybrid.resize_token_embeddings(50)
    hybrid.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.get_input_embeddings().weight, hybrid.get_input_embeddings().weight)
