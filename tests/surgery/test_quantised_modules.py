"""Models with quantised projections compute what the dequantised weights say: with modules made here, and bitsandbytes'."""

import copy
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from surgery.errors import UserError
from surgery.records.plan import Plan
from surgery.splicing.splice import adopt, splice
from tests.models import BASES, but_slow, random_base
from tests.surgery.test_half import HEADS, LAYER

FAMILIES = ("plain", "mamba, biases, untied", "falcon mamba", "llamba")


class Quantised(nn.Module):
    """A Linear whose weight is stored in one byte a number, with a scale a row."""

    def __init__(self, linear: nn.Linear, stored: torch.dtype):
        super().__init__()
        weight = linear.weight.detach().float()
        self.scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-9) / 100
        weight = weight / self.scale
        self.weight = nn.Parameter((weight.round() if stored == torch.int8 else weight).to(stored), requires_grad=False)
        self.bias = linear.bias

    def dequantised(self) -> Tensor:
        return self.weight.float() * self.scale

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        return nn.functional.linear(x, self.dequantised().to(x.dtype), self.bias)


def quantise(model, stored):
    """All of the model's projections and its head, in place; and a copy with the weights that they stand for."""
    exact = copy.deepcopy(model).float()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            narrow = Quantised(module, stored)
            model.set_submodule(name, narrow)
            exact.get_submodule(name).weight = nn.Parameter(narrow.dequantised())
    return model, exact


FLOAT8 = (torch.bfloat16, torch.float8_e4m3fn)
INTEGERS = [(dtype, torch.int8) for dtype in (torch.float32, torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("dtype", "stored"), but_slow([FLOAT8, *INTEGERS], FLOAT8, INTEGERS[0]), ids=str)
@pytest.mark.parametrize("plan", [None, HEADS, LAYER], ids=["adopted", "heads", "layer"])
@pytest.mark.parametrize("base", FAMILIES)
@torch.no_grad()
def test_a_quantised_model_is_its_dequantised_one(base, plan, dtype, stored, tokens):
    base = BASES[base]()
    model, exact = quantise((adopt(base) if plan is None else splice(base, plan)).to(dtype), stored)
    wanted, found = exact(tokens).logits, model(tokens).logits
    bound = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    assert (found - wanted).norm() / wanted.norm() < bound
    cached = model(tokens[:, :20], use_cache=True)
    step = model(tokens[:, 20:21], cache_params=cached.cache_params, use_cache=True).logits[:, 0]
    assert (step - wanted[:, 20]).norm() / wanted[:, 20].norm() < 2 * bound


# bitsandbytes cuts a matrix into pieces of 64 columns, and its 4-bit product on a CPU takes rows by 32.
WIDE = {
    "plain": {"num_heads": 16, "head_dim": 8},
    "mamba": {"hidden_size": 64, "time_step_rank": 64, "state_size": 32},
    "falcon mamba": {"hidden_size": 64, "time_step_rank": 64, "state_size": 32},
}
WAYS = {"8 bits": {"load_in_8bit": True}, "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EACH_ONCE = [*zip(WIDE, DTYPES, strict=True)]  # every family, and every dtype, in either number of bits


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("base", "dtype"),
    [
        pytest.param(*pair, marks=() if pair in EACH_ONCE else pytest.mark.slow, id="-".join(map(str, pair)))
        for pair in product(WIDE, DTYPES)
    ],
)
@torch.no_grad()
def test_bitsandbytes(base, dtype, way, tokens, tmp_path):
    """As near to the float model as transformers' own in so many bits; its Mamba-1 does not run in any."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    stock = BASES[base](**WIDE[base])
    models = {"stock": stock, "adopted": adopt(stock), "hybrid": splice(stock, HEADS)}
    errors, agreements = {}, {}
    for name, model in models.items():
        if (base, name) == ("mamba", "stock"):
            continue
        exact = model(tokens).logits
        model.save_pretrained(tmp_path / name)
        quantisation = BitsAndBytesConfig(**WAYS[way])
        narrow = AutoModelForCausalLM.from_pretrained(tmp_path / name, quantization_config=quantisation, dtype=dtype)
        found = narrow(tokens).logits
        errors[name] = ((found - exact).norm() / exact.norm()).item()
        agreements[name] = (found.argmax(-1) == exact.argmax(-1)).float().mean().item()
    reference = errors.get("stock", {"8 bits": 0.04, "4 bits": 0.35}[way])
    for name in ("adopted", "hybrid"):
        assert errors[name] < 1.3 * reference
        assert agreements[name] > agreements.get("stock", 0.95) - 0.06


def test_weights_in_float8_stay_with_their_modules():
    """float8 is floating point, and yet means nothing without its scales."""
    base = random_base(num_hidden_layers=2)

    class Float8(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight.to(x.dtype) * self.weight_scale_inv)

    for block in base.backbone.layers:
        wide = block.mixer.in_proj
        narrow = block.mixer.in_proj = Float8(wide.in_features, wide.out_features, bias=False)
        narrow.weight = nn.Parameter((100 * wide.weight).to(torch.float8_e4m3fn), requires_grad=False)
        narrow.weight_scale_inv = nn.Parameter(torch.tensor(0.01), requires_grad=False)
    base.is_quantized, base.hf_quantizer = True, SimpleNamespace(modules_to_not_convert=[])
    base.config.quantization_config = {"quant_method": "fp8"}
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(adopt(base)(ids).logits, base(ids).logits, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match="quantised as Float8 cannot be grafted; use bitsandbytes"):
        splice(base, Plan(sites=("L1.H3",)))
