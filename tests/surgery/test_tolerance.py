"""What a proof allows: more than rounding, and less than a defect."""

import copy

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from surgery import load
from surgery.exporting.tolerance import tolerance
from surgery.records.plan import Plan
from surgery.serving import proving
from surgery.splicing.splice import splice
from tests.models import ROOT, random_base, random_llamba, random_selective
from tests.surgery.test_export_formats import LAYER, lively

PLAN = Plan(sites=("L0.H3",))
MODELS = {
    "one layer": lambda: splice(lively(random_base(num_hidden_layers=1)), PLAN),
    "32 layers": lambda: splice(lively(random_base(num_hidden_layers=32)), PLAN),
    "layer graft": lambda: splice(lively(random_base()), LAYER),
    "mamba": lambda: splice(lively(random_selective(MambaConfig, MambaForCausalLM, num_hidden_layers=8)), PLAN),
    "llamba": lambda: splice(lively(random_llamba()), PLAN),
    **{
        name: lambda name=name: splice(load(str(ROOT / "checkpoints" / name)).model.float(), Plan(sites=("L1.H3,5",)))
        for name in ("tiny-mamba2", "tiny-mamba", "tiny-books")
    },
}


def in_float64(model):
    """All of it: also the stream between the blocks, which the configuration may keep in float32."""
    model = copy.deepcopy(model).double()
    for layer in model.base_model.layers:
        layer.residual_in_fp32 = False
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_rounding_is_a_quarter_of_what_is_allowed(name):
    model = MODELS[name]().eval()
    exact, layers = in_float64(model), model.config.num_hidden_layers
    for length in (1, 40, 700):
        ids = torch.randint(1, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(length))
        logits = model(ids).logits
        rounding = (logits.double() - exact(ids).logits).abs().max().item()
        assert rounding <= tolerance(logits, length, layers) / 4, length


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 40, 700])
def test_a_defect_is_far_outside(length):
    """Each is one number or one bit of a configuration of tiny-mamba2 with two grafted heads, as an engine might have it."""
    model = MODELS["tiny-mamba2"]().eval()
    ids = torch.randint(1, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    live, mixer = model(ids).logits, model.base_model.layers[1].mixer
    allowed = tolerance(live, length, model.config.num_hidden_layers)
    faults = {
        "epsilon of a norm": lambda m: setattr(m.base_model.layers[1].norm, "variance_epsilon", 1e-3),
        "one head's skip": lambda m: m.base_model.layers[1].mixer.D.data[3:4].mul_(1.1),
        "one head's decay": lambda m: m.base_model.layers[1].mixer.A_log.data[2:3].add_(0.3),
        "one head's scale": lambda m: m.base_model.layers[1].mixer.graft.log_tau.data[:1].add_(0.2),
    }
    assert mixer.graft is not None
    for fault, plant in faults.items():
        if length == 1 and fault in ("one head's decay", "one head's scale"):
            continue  # of a single token there is no past
        other = copy.deepcopy(model)
        plant(other)
        found = (other(ids).logits - live).abs().max().item()
        assert found > 2 * allowed, (fault, found, allowed)


def test_long_prompts_are_asked():
    assert max(proving.LENGTHS) >= 700
