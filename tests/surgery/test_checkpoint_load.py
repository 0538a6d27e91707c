"""surgery.load: where models come from, what dtype and device they get, and the fingerprint that tells them apart."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Mamba2ForCausalLM, MambaForCausalLM

from surgery.errors import UserError
from surgery.loading import checkpoint
from surgery.loading.digests import fingerprint
from surgery.splicing.load import load
from surgery.world.tokenizer import build_tokenizer
from tests.models import random_base
from tests.test_original import IDS, MAMBA1, MAMBA2, state_of, stock, write

HAS_GPU = torch.cuda.is_available()
MODELS: dict[str, Any] = {"mamba": MAMBA1, "mamba2": MAMBA2}
Both = Callable[..., tuple[Path, Path, Any]]


def write_both(folder: Path, model_type: str, dtype: torch.dtype = torch.float32) -> tuple[Path, Path, Any]:
    """An original folder, transformers' own of the same model, in shards, and the model."""
    of = MODELS[model_type]
    model = stock(of, dtype, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    for name in ("original", "hf"):
        (folder / name).mkdir()
        build_tokenizer().save_pretrained(folder / name)
    write(folder / "original", of.tiny, state_of(model))
    model.save_pretrained(folder / "hf", max_shard_size="5KB")
    return folder / "original", folder / "hf", model


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """write_both, once for the same arguments. Do not change what it gives."""
    return cache(lambda *arguments: write_both(tmp_path_factory.mktemp("both"), *arguments))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS.to(model.device)).logits.cpu()


def refused(folder: Path, *words: str, **arguments: Any) -> None:
    with pytest.raises(UserError) as caught:
        load(folder, **arguments)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_format_is_the_same_model(both: Both, model_type: str, dtype: torch.dtype) -> None:
    original, shards, model = both(model_type, dtype)
    assert len(list(shards.glob("*.safetensors"))) > 2
    for folder in (original, shards):
        found = load(folder)
        assert type(found.model) is {"mamba": MambaForCausalLM, "mamba2": Mamba2ForCausalLM}[model_type]
        assert found.fingerprint == fingerprint(model)
        assert {p.dtype for p in found.model.parameters()} == {dtype}
        assert {p.device.type for p in found.model.parameters()} == {"cpu"}
        assert found.model.dtype == dtype == found.model.config.dtype
        assert not found.model.training
        assert torch.equal(logits(found.model), logits(model))


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize(("stored", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_another_dtype(both: Both, model_type: str, stored: str, wanted: str) -> None:
    original, shards, model = both(model_type, getattr(torch, stored))
    model = copy.deepcopy(model).to(getattr(torch, wanted))
    for folder in (original, shards):
        found = load(folder, dtype=wanted)
        assert found.fingerprint == fingerprint(model)
        assert found.model.config.dtype == getattr(torch, wanted)
        assert torch.equal(logits(found.model), logits(model))


def test_unknown_dtypes_and_devices(both: Both) -> None:
    for folder in both("mamba")[:2]:
        for dtype in ("fp16", "int8", "nn", "", "float8_e4m3fn", "complex64"):
            refused(folder, "dtype", f"'{dtype}'", "bfloat16", dtype=dtype)
        for device in ("abacus", "auto"):
            refused(folder, "device", device, "auto, cpu, cuda", device=device)
        if not HAS_GPU:
            refused(folder, "device", "set device=cpu", device="cuda")


@pytest.mark.parametrize("model_type", MODELS)
def test_balanced_is_the_same_model(both: Both, model_type: str) -> None:
    """On the CPU where there is no accelerator; wholly on the first where it is large enough."""
    original, shards, model = both(model_type)
    for folder in (original, shards):
        found = load(folder, device="balanced")
        assert found.fingerprint == fingerprint(model)
        assert {p.device.type for p in found.model.parameters()} == {"cuda" if HAS_GPU else "cpu"}
        assert found.model.lm_head.weight is found.model.backbone.embeddings.weight
        assert not found.model.training
        torch.testing.assert_close(logits(found.model), logits(model), atol=1e-4 if HAS_GPU else 0, rtol=0)


def test_balanced_offloads_nothing(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    original, shards, _ = both("mamba")
    for where in ("accelerate.utils.modeling.get_max_memory", "transformers.integrations.accelerate.accelerate_max_memory"):
        monkeypatch.setattr(where, lambda *_: {"cpu": 10_000})
    for folder in (original, shards):
        refused(folder, str(folder), "does not fit", device="balanced")
    monkeypatch.setattr(checkpoint, "infer_auto_device_map", lambda *_, **__: {"backbone": 0, "lm_head": "cpu"})
    refused(original, "does not fit", device="balanced")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("model_type", MODELS)
def test_balanced_over_two_devices(both: Both, model_type: str) -> None:
    original, shards, model = both(model_type)
    for folder in (original, shards):
        found = load(folder, device="balanced")
        assert len({p.device for p in found.model.parameters()}) > 1
        assert found.fingerprint == fingerprint(model)
        torch.testing.assert_close(logits(found.model), logits(model), atol=1e-4, rtol=0)


def test_sharded_folders_that_are_damaged(tmp_path: Path) -> None:
    for folder, weights in zip(write_both(tmp_path, "mamba")[:2], ("pytorch_model.bin", "*-00002-*.safetensors"), strict=True):
        (path,) = folder.glob(weights)
        path.unlink()
        refused(folder, str(folder))


# Fingerprints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_fingerprint_sees_every_bit(dtype: torch.dtype) -> None:
    model = random_base().to(dtype)
    before = fingerprint(model)
    assert before == fingerprint(random_base().to(dtype))
    seen = {before}
    for parameter in model.parameters():
        bits = parameter.data.view(-1).view(torch.uint8)
        bits[-2] ^= 1  # the last bit of a bfloat16's mantissa
        seen.add(fingerprint(model))
        bits[-2] ^= 1
    assert len(seen) == 1 + len(list(model.parameters()))
    assert fingerprint(model) == before


def test_a_fingerprint_sees_the_dtype_and_not_the_layout() -> None:
    assert fingerprint(random_base()) != fingerprint(random_base().to(torch.bfloat16))
    model = random_base()
    before = fingerprint(model)
    weight = model.backbone.layers[0].mixer.out_proj.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    assert fingerprint(model) == before


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fingerprint_is_the_same_on_every_device(dtype: torch.dtype) -> None:
    model = random_base().to(dtype)
    assert fingerprint(model) == fingerprint(model.to("cuda"))
