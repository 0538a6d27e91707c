"""Small random models of the exact Hugging Face class, and the built-in checkpoint."""

import os
import sys
from pathlib import Path

# One thread a process, subprocesses included: pytest-xdist runs one process a core, and threads that wait for each other beside
# other busy processes are many times slower than none. Before torch is imported, which reads it.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

ROOT = Path(__file__).parent.parent
TINY = ROOT / "checkpoints" / "tiny-mamba2"
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for the Hub is a mistake

VARIANTS = {
    "plain": {},
    "groups": {"n_groups": 2},
    "group per two heads, biases": {"n_groups": 4, "use_bias": True},
    "no conv bias": {"use_conv_bias": False},
    "dt limit": {"n_groups": 2, "time_step_limit": (0.0, 0.05)},
    "untied": {"tie_word_embeddings": False},
}


def random_base(**changes) -> Mamba2ForCausalLM:
    """3 layers of 8 heads; the same weights every time."""
    torch.manual_seed(0)
    fields = {
        "num_heads": 8, "head_dim": 16, "vocab_size": 99, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 3,
        "n_groups": 1, "chunk_size": 16, "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 0,
        "eos_token_id": None,
    }  # fmt: skip
    return Mamba2ForCausalLM(Mamba2Config(**fields | changes)).eval()


@pytest.fixture(params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def base(request) -> Mamba2ForCausalLM:
    return random_base(**VARIANTS[request.param])


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(1, 99, (2, 37), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def tiny():
    """The built-in checkpoint, loaded once; do not change it."""
    import surgery

    return surgery.load(TINY)


@pytest.fixture
def surgery(monkeypatch, capsys, tmp_path):
    """Call the command in an empty working directory: (status, standard output, standard error)."""
    from surgery import cli

    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["surgery", *map(str, arguments)])
        try:
            cli.main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call
