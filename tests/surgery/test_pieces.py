"""Logits in pieces: the same figures, and never more logits at once than a piece has."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from surgery.evaluation.suites.language import sliding_losses, sliding_rows
from surgery.models import pieces
from surgery.models.pieces import computed_once, logits_in_pieces
from surgery.probes.perplexity import TextWindows
from surgery.probes.question import Completion, Question
from surgery.probes.scoring import answer, complete
from surgery.splicing.splice import adopt
from surgery.world.tokenizer import build_tokenizer
from tests.models import SAME, random_base, random_llamba

SMALL = 300  # logits: of three rows of 99 words


class Largest(TorchDispatchMode):
    """The most numbers of a tensor, among those that operations give, that end in `size`."""

    def __init__(self, size):
        super().__init__()
        self.size, self.numbers = size, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(given):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.size,):
                self.numbers = max(self.numbers, tensor.numel())
        return given


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).eval()


MODELS = {"mamba2": random_base, "adopted": lambda: adopt(random_base()), "llamba": random_llamba, "llama": llama}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]().double()


@pytest.mark.usefixtures("in_float64")
def test_text_losses_are_the_same_in_pieces(model, tokens, monkeypatch):
    probe, whole = TextWindows(), model(input_ids=tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
    expected = -whole.gather(-1, tokens[:, 1:, None])[..., 0].detach()
    monkeypatch.setattr(pieces, "LOGITS", SMALL)
    for batch_size in (1, 2):
        losses = torch.from_numpy(probe.losses(model, tokens, batch_size))
        torch.testing.assert_close(losses, expected.mean(1), **SAME)
    rows = sliding_rows(tokens)
    in_pieces = sliding_losses(model, rows)
    monkeypatch.undo()
    assert in_pieces == pytest.approx(sliding_losses(model, rows), rel=1e-9)


def test_logits_in_pieces_are_the_logits(model, tokens, monkeypatch):
    positions = torch.tensor([3, 17, 18, 36, 5])
    whole = model(input_ids=tokens, use_cache=False).logits[:, positions]
    monkeypatch.setattr(pieces, "LOGITS", SMALL)
    parts = list(logits_in_pieces(model, tokens, positions))
    assert [(piece.start, piece.stop) for piece, _ in parts] == [(i, i + 1) for i in range(5)]
    torch.testing.assert_close(torch.cat([part for _, part in parts], 1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits[:, positions], whole, rtol=0, atol=0)


def test_the_blocks_run_once_and_a_piece_bounds_the_logits(model, tokens, monkeypatch):
    calls = []
    handle = model.base_model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(pieces, "LOGITS", SMALL)
    for rows in (tokens, tokens.repeat(3, 1)):
        calls.clear()
        with Largest(99) as largest:
            TextWindows().losses(model, rows, batch_size=len(rows))
        assert len(calls) == 1
        assert 0 < largest.numbers <= max(SMALL, len(rows) * 99)  # a position of every row is the least
    handle.remove()


class Odd(LlamaForCausalLM):
    """A class whose forward does not call its base model."""

    base_model = property(lambda self: torch.nn.Identity())


def test_a_model_whose_base_is_not_called_is_run_twice_at_most(tokens, monkeypatch):
    model, calls = llama().double(), []
    expected = TextWindows().losses(model, tokens)
    model.__class__ = Odd
    model.register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(pieces, "LOGITS", SMALL)
    assert TextWindows().losses(model, tokens) == pytest.approx(expected, rel=1e-6)
    assert len(calls) == 2  # a piece, and then all the rest


@pytest.mark.parametrize("hooked", [False, True])
def test_a_module_computes_once(hooked):
    module, calls = torch.nn.Linear(2, 2), []
    if hooked:  # as accelerate does
        own = module.forward
        module.forward = lambda x: calls.append(1) or own(x)
    x, y = torch.randn(1, 2), torch.randn(1, 2)
    before = vars(module).get("forward")
    with computed_once(module) as known:
        assert not known()
        assert module(x) is module(y)
        assert known()
    assert vars(module).get("forward") is before
    assert not torch.equal(module(x), module(y))
    assert len(calls) == (3 if hooked else 0)


@pytest.mark.usefixtures("in_float64")
def test_answers_and_completions_are_the_same_in_pieces(monkeypatch):
    tokenizer = build_tokenizer()
    model = adopt(random_base(vocab_size=len(tokenizer)).double())
    texts = ["The", "The capital of the country", "A dog and a cat and a bird", "One two"]
    questions = [Question(text, (" red", " green and blue", " cat"), i % 3) for i, text in enumerate(texts)]
    completions = [Completion(text, " red and green") for text in texts]
    whole = answer(model, tokenizer, questions), complete(model, tokenizer, completions)
    for logits in (1, 4 * len(tokenizer), 9 * len(tokenizer)):
        monkeypatch.setattr(pieces, "LOGITS", logits)
        for expected, given in zip(
            whole, (answer(model, tokenizer, questions), complete(model, tokenizer, completions)), strict=True
        ):
            assert (expected.correct == given.correct).all()
            assert given.loss == pytest.approx(expected.loss, rel=1e-9)
            assert all(map(math.isfinite, given.loss))
