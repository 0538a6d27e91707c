"""Random inputs and models of the shapes of published checkpoints."""

from typing import Any

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM


def ssd_inputs(heads: int, t: int, device: torch.device, dtype: torch.dtype) -> tuple:
    """The arguments of SSD_SCAN for heads of 64 with a state of 128, as in all of state-spaces' Mamba-2."""
    g = torch.Generator().manual_seed(0)
    x, B, C = (torch.randn(1, t, *shape, generator=g).to(device, dtype) for shape in ((heads, 64), (1, 128), (1, 128)))
    dt = (0.001 + 0.1 * torch.rand(1, t, heads, generator=g)).to(device, dtype)
    A, D = (-1 - 15 * torch.rand(heads, generator=g)).to(device), torch.randn(heads, generator=g).to(device)
    return x, dt, A, B, C, D, None, 256


def selective_inputs(channels: int, t: int, device: torch.device, dtype: torch.dtype) -> tuple:
    """The arguments of SELECTIVE_SCAN with a state of 16, in the memory layout of the mixer."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, channels, t, generator=g).to(device, dtype).transpose(1, 2)
    dt = (0.001 + 0.1 * torch.rand(1, channels, t, generator=g)).to(device, dtype).transpose(1, 2)
    A = -torch.arange(1.0, 17.0).repeat(channels, 1).to(device)
    B, C = torch.randn(1, t, 32, generator=g).to(device, dtype).split(16, dim=-1)
    return x, dt, A, B, C, torch.randn(channels, generator=g).to(device), None


def ssd_step_inputs(heads: int, t: int, device: torch.device, dtype: torch.dtype) -> tuple:
    """The arguments of SSD_STEP, t sequences at once."""
    x, dt, A, B, C, D, _, _ = ssd_inputs(heads, t, device, dtype)
    x, dt, B, C = (m.squeeze(0) for m in (x, dt, B, C))
    return torch.zeros(t, heads, 64, 128, device=device), x, dt, A, B, C, D


def selective_step_inputs(channels: int, t: int, device: torch.device, dtype: torch.dtype) -> tuple:
    """The arguments of SELECTIVE_STEP, t sequences at once."""
    x, dt, A, B, C, D, _ = selective_inputs(channels, t, device, dtype)
    x, dt, B, C = (m.squeeze(0) for m in (x, dt, B, C))
    return torch.zeros(t, channels, 16, device=device), x, dt, A, B, C, D


def conv_inputs(channels: int, t: int, device: torch.device, dtype: torch.dtype) -> tuple:
    """The arguments of CAUSAL_CONV in the memory layout of a Mamba-2 mixer: a part of a wider projection."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, t, 2 * channels, generator=g).to(device, dtype)[..., channels:]
    weight, bias = (torch.randn(*shape, generator=g).to(device, dtype) for shape in ((channels, 1, 4), (channels,)))
    return x, weight, bias, t, True


def norm_inputs(channels: int, t: int, device: torch.device, dtype: torch.dtype) -> tuple:
    """The arguments of RMS_NORM in a Mamba-2 mixer: its gate is a part of a wider projection."""
    g = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(1, t, w, generator=g).to(device, dtype) for w in (channels, 2 * channels))
    return x, torch.randn(channels, generator=g).to(device, dtype), 1e-5, gate[..., :channels], channels


def logits(words: int, t: int, device: torch.device, dtype: torch.dtype) -> tuple:
    """The arguments of KL_DIVERGENCE: the logits of a student, and those of its teacher, which are close to them."""
    teacher, noise = torch.randn(2, t, words, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return teacher + 0.1 * noise, teacher


def attention_inputs(heads: int, t: int, device: torch.device, dtype: torch.dtype) -> tuple:
    """The arguments of GRAFT_ATTENTION for dual grafts of heads of 64 with a state of 128 and log dt, one pair a head."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, t, w, generator=g).to(device, dtype) for w in (129, 129, 64))
    return q / 11, k, v, None


# With transformers' default of 0.1, 24 random layers amplify rounding until two correct computations differ by 0.01.
SPREAD = 0.02


def _mamba2_130m() -> Any:
    config = Mamba2Config(
        num_heads=24, head_dim=64, vocab_size=50288, hidden_size=768, state_size=128, num_hidden_layers=24, n_groups=1,
        tie_word_embeddings=True, initializer_range=SPREAD,
    )  # fmt: skip
    torch.manual_seed(0)
    return Mamba2ForCausalLM(config)


def _tiny_mamba2() -> Any:
    config = Mamba2Config(
        num_heads=8, head_dim=32, vocab_size=1664, hidden_size=128, state_size=16, num_hidden_layers=4, n_groups=1,
        chunk_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return Mamba2ForCausalLM(config)


def _mamba_130m() -> Any:
    torch.manual_seed(0)
    return MambaForCausalLM(
        MambaConfig(vocab_size=50280, hidden_size=768, state_size=16, num_hidden_layers=24, initializer_range=SPREAD)
    )


BASES = {"tiny-mamba2": _tiny_mamba2, "mamba2-130m": _mamba2_130m, "mamba-130m": _mamba_130m}
