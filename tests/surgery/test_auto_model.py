"""transformers' AutoModel on the folder of a hybrid: the backbone, whose mixers are ours."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from surgery.records.plan import Plan
from surgery.splicing.splice import splice
from tests.models import BASES
from tests.surgery.stock_bases import KINDS, base_of

FAMILIES = ("plain", "mamba", "falcon mamba", "llamba")
MADE = {**{name: BASES[name] for name in FAMILIES}, **{name: lambda name=name: base_of(name) for name in KINDS}}


@pytest.mark.parametrize("kind", MADE)
def test_the_backbone_is_that_of_the_language_model(kind, tmp_path):
    """Loaded or made from the configuration; with the logits' own head on its states they are the live model's, cached too."""
    hybrid = splice(MADE[kind](), Plan(sites=("L1.H1",))).eval()
    hybrid.save_pretrained(tmp_path)
    ids = torch.randint(1, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    backbone = AutoModel.from_pretrained(tmp_path)
    assert type(backbone) is type(hybrid.base_model)
    assert {*backbone.state_dict()} == {*hybrid.base_model.state_dict()}
    with torch.no_grad():
        expected = hybrid.base_model(ids, use_cache=False).last_hidden_state
        for use_cache in (False, True):
            assert torch.equal(backbone(ids, use_cache=use_cache).last_hidden_state, expected)
    made = AutoModel.from_config(hybrid.config)
    assert {*made.state_dict()} == {*backbone.state_dict()}


@pytest.mark.slow  # a process each; one without the package generates in test_export_proof.py
@pytest.mark.parametrize("kind", ["plain", "bamba"])
def test_the_backbone_loads_where_the_package_is_not_installed(kind, tmp_path):
    """The package's folder is not on the path of that process, which knows the classes by the folder's own code only."""
    hybrid = splice(MADE[kind](), Plan(sites=("L1.H1",))).eval()
    hybrid.save_pretrained(tmp_path / "hybrid")
    lines = (
        "import sys; sys.modules['surgery'] = None\n"
        "from transformers import AutoModel\n"
        "model, told = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True, output_loading_info=True)\n"
        "print(type(model).__name__, sorted(told['missing_keys']), sum(p.double().sum().item() for p in model.parameters()))"
    )
    there = subprocess.run(
        [sys.executable, "-c", lines, tmp_path / "hybrid"], capture_output=True, text=True, cwd=tmp_path, check=True
    ).stdout.split()
    here = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid").base_model
    assert there[:2] == [type(here).__name__, "[]"]
    assert float(there[2]) == pytest.approx(sum(p.double().sum().item() for p in here.parameters()), abs=1e-9)
