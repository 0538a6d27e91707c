"""Mamba-2 models made by hand, in which it is known which heads gather and which aggregate.

A record is "* KEY filler ... filler VALUE", and the prompt ends with "ask KEY ?". The stream of a token holds what it is (one
dimension a word), a constant, and four codes: its own key or value, the key that was carried to it, and the value that was
found. All of it is turned by a random rotation. What stands at random layers and places:

- a head that every token needs: it writes the codes of keys and values;
- a sink: it writes the same at every token;
- a gather head: it holds the key of a record in its state until the next one, and writes it at every token;
- a convolution that gathers, where KEY and VALUE are neighbours: the queried layer makes its keys (B) of the token before;
- an aggregate head: it stores, at values, the value under its key, and reads, at "?", what is stored under the asked key;
- two aggregate heads that stand in for each other, in one layer or in two;
- a memory: it knows the value of each key by itself, and looks at no record.
"""

import random
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedTokenizerFast

from surgery.probes.question import Question, with_spans

CODES, HEADS, LAYERS, WIDTH, STATE = 12, 6, 3, 24, 12
KEYS, VALUES = [f"k{i}" for i in range(CODES)], [f"v{i}" for i in range(CODES)]
FILLERS = [f"f{i}" for i in range(6)]
WORDS = ["*", "ask", "?", *FILLERS, *KEYS, *VALUES]
HIDDEN = HEADS * WIDTH
CONSTANT = len(WORDS)
OWN_KEY, OWN_VALUE, CARRIED, FOUND = (CONSTANT + 1 + CODES * i for i in range(4))  # where codes begin in the stream
SINK, JUNK = HIDDEN - 1, HIDDEN - 2
KINDS = ("head", "convolution", "pair", "layers", "memory", "nothing")


@dataclass(frozen=True)
class Planted:
    """A model, and the units that gather and aggregate in it."""

    model: Any
    gather: tuple[str, ...]
    aggregate: tuple[str, ...]


class Layer:
    """The weights of one layer before the rotation."""

    def __init__(self, rng: random.Random):
        self.into = torch.zeros(2 * HIDDEN + 2 * STATE + HEADS, HIDDEN)
        self.out = torch.zeros(HIDDEN, HIDDEN)
        self.taps = torch.zeros(HIDDEN + 2 * STATE, 4)
        self.taps[:, -1] = 1
        self.D, self.A_log = torch.zeros(HEADS), torch.zeros(HEADS)
        self.x, self.B, self.C, self.dt = (self.into[a:] for a in (HIDDEN, 2 * HIDDEN, 2 * HIDDEN + STATE, -HEADS))
        self.into[:HIDDEN, CONSTANT] = 12  # an open gate for all
        self.dt[:, CONSTANT] = -4  # no head stores anything
        self.free = rng.sample(range(HEADS), HEADS)

    def head(self, reads: list[int], writes: list[int], gain: float = 1.0) -> int:
        """A free head that reads some dimensions of the stream and writes others."""
        number = self.free.pop()
        for slot, (read, write) in enumerate(zip(reads, writes, strict=True)):
            self.x[number * WIDTH + slot, read] = gain
            self.out[write, number * WIDTH + slot] = 0.25
        return number

    def skip(self, reads: list[int], writes: list[int]) -> int:
        """A head that passes on what it reads at each token."""
        number = self.head(reads, writes)
        self.D[number] = 1
        return number

    def store(self, number: int, words: list[str], forgets: bool) -> None:
        """Let a head store what it reads, at some words."""
        self.dt[number, [WORDS.index(word) for word in words]] = 8
        self.A_log[number] = 0.0 if forgets else -30.0

    def code(self, part: Tensor, first: int, before: bool) -> None:
        """Make B or C of a code of the stream: of this token, or of the one before."""
        part[:STATE, first : first + CODES] = torch.eye(CODES)
        start = HIDDEN + (STATE if part is self.C else 0)
        if before:
            self.taps[start : start + STATE] = torch.tensor([0.0, 0, 1, 0])


def plant(kind: str, seed: int, dtype: torch.dtype = torch.float32) -> Planted:
    """A model of one of KINDS."""
    rng = random.Random(f"{kind} {seed}")
    layers = [Layer(rng) for _ in range(LAYERS)]
    early, late = sorted(rng.sample(range(LAYERS), 2)) if kind != "layers" else (0, 1)
    first, last = layers[early], layers[late]
    words = [WORDS.index(word) for word in (*KEYS, *VALUES)]
    first.skip(words, [*range(OWN_KEY, OWN_KEY + CODES), *range(OWN_VALUE, OWN_VALUE + CODES)])
    first.skip([CONSTANT], [SINK])
    gather, aggregate = (), list[str]()
    if kind in ("head", "pair", "layers"):
        carrier = first.head(words[:CODES], list(range(CARRIED, CARRIED + CODES)), 0.04)
        first.store(carrier, KEYS, forgets=True)
        first.B[0, CONSTANT] = first.C[0, CONSTANT] = 0.15
        gather = (f"L{early}.H{carrier}",)
    if kind == "convolution":
        gather = (f"L{late} convolution",)
    if kind == "memory":
        number = last.skip(list(range(OWN_KEY, OWN_KEY + CODES)), list(range(FOUND, FOUND + CODES)))
        last.taps[number * WIDTH : (number + 1) * WIDTH] = torch.tensor([0.0, 0, 1, 0])
    for layer in {"head": [last], "convolution": [last], "pair": [last, last], "layers": layers[1:]}.get(kind, []):
        number = layer.head(list(range(OWN_VALUE, OWN_VALUE + CODES)), list(range(FOUND, FOUND + CODES)))
        layer.store(number, VALUES, forgets=False)
        aggregate.append(f"L{late}.H{number}")
    for layer in layers[1:] if kind == "layers" else [last]:
        layer.code(layer.B, OWN_KEY if kind == "convolution" else CARRIED, before=kind == "convolution")
        layer.code(layer.C, OWN_KEY, before=True)
    if kind == "layers":
        aggregate = ["L1 + L2"]
    for layer in layers:
        while layer.free:
            layer.skip([rng.randrange(len(WORDS))], [JUNK])
    pair = [" + ".join(order) for order in (aggregate, aggregate[::-1])] if kind == "pair" else aggregate
    return Planted(build(layers, seed, dtype), gather, tuple(pair))


@torch.no_grad()
def build(layers: list[Layer], seed: int, dtype: torch.dtype) -> Mamba2ForCausalLM:
    """The model of these layers, in a random basis."""
    model = Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=len(WORDS),
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            expand=1,
            head_dim=WIDTH,
            num_heads=HEADS,
            state_size=STATE,
            n_groups=1,
            conv_kernel=4,
        )
    ).eval()
    basis = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(seed)))[0]
    embeddings = torch.zeros(len(WORDS), HIDDEN)
    embeddings[:, : len(WORDS)], embeddings[:, CONSTANT] = torch.eye(len(WORDS)), 1
    head = torch.zeros(len(WORDS), HIDDEN)
    head[[WORDS.index(value) for value in VALUES], FOUND : FOUND + CODES] = torch.eye(CODES)
    model.backbone.embeddings.weight.copy_(embeddings @ basis)
    model.lm_head.weight = torch.nn.Parameter(head @ basis)
    for block, layer in zip(model.backbone.layers, layers, strict=True):
        mixer = block.mixer
        mixer.in_proj.weight.copy_(layer.into @ basis)
        mixer.out_proj.weight.copy_(basis.T @ layer.out)
        mixer.conv1d.weight.copy_(layer.taps[:, None])
        mixer.conv1d.bias.zero_()
        mixer.dt_bias.zero_()
        mixer.D.copy_(layer.D)
        mixer.A_log.copy_(layer.A_log)
    return model.to(dtype)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="*"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def ask(kind: str, n: int, seed: int, records: int = 6) -> list[Question]:
    """Questions for a model of this kind."""
    rng, questions = random.Random(seed), []
    for _ in range(n):
        keys, values = rng.sample(range(CODES), records), rng.sample(range(CODES), records)
        values = keys if kind == "memory" else values
        fillers = [[] if kind == "convolution" else rng.choices(FILLERS, k=rng.randint(4, 6)) for _ in keys]
        lines = [" ".join(["*", KEYS[k], *between, VALUES[v], ""]) for k, between, v in zip(keys, fillers, values, strict=True)]
        prompt, spans = with_spans("", lines)
        answer = rng.randrange(records)
        choices = tuple(f" {VALUES[v]}" for v in values)
        questions.append(Question(f"{prompt}ask {KEYS[keys[answer]]} ?", choices, answer, spans, answer))
    return questions
