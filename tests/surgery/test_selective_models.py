"""Mamba-1 and Falcon-Mamba on our kernels: equal to transformers, and to themselves however they are run."""

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM

import surgery
from surgery.errors import UserError
from surgery.kernels.dispatch import use
from surgery.kernels.selective import SELECTIVE_SCAN
from surgery.plan import Plan
from surgery.splice import adopt, splice, unsplice

FIELDS = {
    "vocab_size": 99, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 3, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": None,
}  # fmt: skip
MODELS = {
    "mamba": lambda: MambaForCausalLM(MambaConfig(**FIELDS)),
    "mamba, biases, untied": lambda: MambaForCausalLM(MambaConfig(**FIELDS, use_bias=True, tie_word_embeddings=False)),
    "mamba, no conv bias": lambda: MambaForCausalLM(MambaConfig(**FIELDS, use_conv_bias=False)),
    "falcon": lambda: FalconMambaForCausalLM(FalconMambaConfig(**FIELDS)),
}


@pytest.fixture(params=MODELS, ids=lambda name: name.replace(",", "").replace(" ", "-"))
def base(request):
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    with torch.no_grad():  # as initialised, B, C and the time step hardly depend on the input
        for block in model.backbone.layers:
            block.mixer.x_proj.weight.normal_(std=0.5)
    return model


def test_equals_transformers_exactly_with_the_stock_kernels(base, tokens):
    with use(causal_conv="stock", selective_scan="stock", selective_step="stock"):
        assert torch.equal(adopt(base)(tokens).logits, base(tokens).logits)


@pytest.mark.parametrize("backend", [name for name in SELECTIVE_SCAN.backends if name != "mamba_ssm"])
def test_equals_transformers_closely_with_every_kernel(base, tokens, backend):
    with use(selective_scan=backend):
        torch.testing.assert_close(adopt(base)(tokens, use_cache=False).logits, base(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_padded_batch_equals_transformers_and_its_rows(base, tokens):
    mask = torch.ones_like(tokens)
    mask[0, :6] = 0
    ours = adopt(base)(tokens, attention_mask=mask).logits
    torch.testing.assert_close(ours, base(tokens, attention_mask=mask).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[0, 6:], base(tokens[:1, 6:]).logits[0], rtol=1e-4, atol=1e-4)


def test_cached_equals_uncached(base, tokens):
    """A prompt, single tokens, then several at once from the cache, where the stock model forgets its state."""
    ours = adopt(base)
    output = ours(tokens[:, :20], use_cache=True)
    parts, cache = [output.logits], output.cache_params
    for piece in (*tokens[:, 20:30].split(1, dim=1), tokens[:, 30:]):
        parts.append(ours(piece, cache_params=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, 1), base(tokens).logits, rtol=1e-4, atol=1e-4)


def test_generates_what_transformers_generates(base, tokens):
    assert torch.equal(*(m.generate(tokens, max_new_tokens=8, do_sample=False) for m in (adopt(base), base)))


def test_gradients_equal_those_of_transformers(base, tokens):
    def gradients(model):
        model.zero_grad()
        model.train()(tokens, labels=tokens).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    torch.testing.assert_close(gradients(adopt(base)), gradients(base), rtol=1e-3, atol=1e-5)


def test_the_base_stays_as_it_is(base, tokens, tmp_path):
    """Its tensors are shared, its modules are not touched, and what is saved loads as a stock model."""
    kinds = [type(block.mixer) for block in base.backbone.layers]
    expected = base(tokens).logits
    ours = adopt(base)
    assert adopt(ours) is ours
    assert [type(block.mixer) for block in base.backbone.layers] == kinds
    assert all(a is b for a, b in zip(ours.parameters(), base.parameters(), strict=True))
    assert torch.equal(unsplice(ours)(tokens).logits, expected)
    ours.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, expected)


def test_grafts_are_refused_until_there_are_some(base):
    with pytest.raises(UserError, match="cannot be grafted yet"):
        splice(base, Plan(sites=("L1.H3",)))
    with pytest.raises(UserError, match=r"no site L9\.H3"):
        splice(base, Plan(sites=("L9.H3",)))


def test_an_unhandled_field_is_refused(base):
    base.config.sliding_window = 5
    with pytest.raises(UserError, match=r"'sliding_window' \(5\) is not handled by the .*mamba family"):
        adopt(base)


def test_loads_from_a_folder(base, tokens, tmp_path):
    from surgery.world.tokenizer import build_tokenizer

    base.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    assert torch.equal(surgery.load(tmp_path).model(tokens).logits, base(tokens).logits)
