"""Laws of a recurrent state: what must hold for any weights, however a model is run.

A law (laws/NAME.py, `LAW = Law(...)`) lists cases. A case computes the same logits in two ways, and their largest difference is
held to a bound: that of float64, if the whole model can be run in it, or else what rounding explains. A model may refuse a
case, by an error that says so; a crash, or another answer without a word, is wrong.
"""

import copy
import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, PreTrainedModel

from surgery.kernels.choose import KernelError
from surgery.models.anatomy import find_cache

Verdict = Literal["wrong", "refused", "right", "not applicable"]
Pair = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, float]  # what was found, what is right, and a bound of its own
# Of the largest logit, in float64. Rounding there is below 1e-12, but a model may round a constant to float32 in one way of
# computing and not in another: MiniMax's decays, which are off by 1e-8. The least defect in docs/architectures.md is 1e-4.
EXACT = 1e-7
TIMES, LEAST = 16.0, 3e-5  # of what is allowed in float32 and 16 bits; see measure_rounding
PAD = 0
SHORTEST = 41  # tokens of a row: laws ask up to so many
BY_TOKEN = [20, *[1] * 7]  # a prompt, and tokens that go on from its cache one by one
WORDS = (  # of an error that refuses
    "not support|not used by the model|unsupported|cannot|can't|not implemented|unexpected keyword|only support|"
    "only implement|only work|not compatible|use |disabl|invalid|does not|call `"
).split("|")


@torch.no_grad()
def measure_rounding(model: PreTrainedModel, logits: Tensor, ids: Tensor, dtype: torch.dtype | None = None) -> float:
    """How far two correct computations may lie apart: LEAST of the largest logit, and TIMES what one unit in the last place of
    the embeddings changes.

    That response is about the distance to the logits of float64: on all of docs/architectures.md, on the built-in models and on
    random ones of 48 layers, where it is a hundred times as large, they lie at most three times the response away, and so do
    two right ways of computing the same. logits (t, V): the model's, of ids (1, t). dtype: to what one rounds; the model's.
    """
    noise = torch.Generator().manual_seed(0)

    def perturb(module: Any, inputs: Any, output: Tensor) -> Tensor:
        factor = 1 + torch.finfo(dtype or output.dtype).eps * (2 * torch.rand(output.shape, generator=noise) - 1)
        return (output.double() * factor.to(output.device)).to(output.dtype)

    handles = [each.register_forward_hook(perturb) for each in model.modules() if isinstance(each, nn.Embedding)]
    try:
        moved = model(input_ids=ids.to(model.device), use_cache=False).logits[0].cpu()
    finally:
        for handle in handles:
            handle.remove()
    response = (moved.double() - logits.cpu()).nan_to_num(0, 0, 0).abs().max().item()
    return LEAST * max(1.0, logits.nan_to_num(0, 0, 0).abs().max().item()) + TIMES * response


class NotApplicable(Exception):
    """Raised by a case, or by `cases`: this model has nothing that the law is about. Its text says why."""


@dataclass(frozen=True)
class Case:
    """What one case of a law has found. where: at which token the difference is largest, or what the error says."""

    name: str
    verdict: Verdict
    difference: float
    bound: float
    where: str


@dataclass(frozen=True)
class Finding:
    """What a law has found: the worst of its cases."""

    law: str
    verdict: Verdict
    difference: float
    where: str
    bound: float
    meaning: str
    advice: str
    cases: tuple[Case, ...] = ()


@dataclass(frozen=True)
class Law:
    """One law.

    name: as the table has it. protects: what goes wrong for a user where it is broken, in half a line. advice: what to do
    instead. cases: gives the cases of a subject by name, each a function that returns a Pair. slow: whether it is asked only in
    full.
    """

    name: str
    protects: str
    advice: str
    cases: Callable[["Subject"], Mapping[str, Callable[[], Pair]]]
    slow: bool = False

    def run(self, subject: "Subject") -> Finding:
        """Ask all cases, and judge each."""
        found = list[Case]()
        try:
            cases = self.cases(subject)
        except Exception as error:
            found, cases = [told_by(error, "")], {}
        for name, case in cases.items():
            try:
                found.append(subject.judge(name, *case()))
            except KernelError:  # of a backend that was asked for
                raise
            except Exception as error:
                found.append(told_by(error, name))
        # A case that holds outweighs a refusal, which is named beside it.
        order: list[Verdict] = ["wrong", "right", "refused", "not applicable"]
        worst = min(found, key=lambda case: (order.index(case.verdict), -case.difference))
        where = ": ".join(part for part in (worst.name, worst.where) if part)
        if worst.verdict == "right" and (refused := [case.name for case in found if case.verdict == "refused"]):
            where = f"refused: {', '.join(refused)}"
        advice = self.advice if worst.verdict == "wrong" else ""
        return Finding(self.name, worst.verdict, worst.difference, where, worst.bound, self.protects, advice, tuple(found))


def told_by(error: Exception, name: str) -> Case:
    """The case of an error: a refusal where Python code raised one that says what is not supported. What an
    operator raises, of shapes or types, is a crash inside."""
    full = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
    if full or isinstance(error, NotApplicable):
        return Case(name, "not applicable", 0.0, 0.0, "there is not enough memory" if full else str(error))
    line = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    kinds = (ValueError, TypeError, AttributeError, ImportError, RuntimeError)
    words = isinstance(error, kinds) and any(word in str(error).lower() for word in WORDS)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = (frame.line or "").startswith("raise") or "unexpected keyword" in str(error)
    refused = isinstance(error, NotImplementedError) or (words and said)
    return Case(name, "refused" if refused else "wrong", math.inf, 0.0, line)


@dataclass(eq=False)
class Subject:
    """A model as laws see it: a copy in eval mode, in float64 where all of it can be run so.

    ids (4, t): random tokens, t beyond a chunk of its scan. source: the model itself. chunk: tokens of such a chunk, if the
    configuration has it. exact: whether all of it runs in float64; dtype: what it runs in.
    """

    model: PreTrainedModel
    ids: Tensor
    source: PreTrainedModel
    chunk: int | None = None
    exact: bool = True
    dtype: torch.dtype = torch.float64
    by_token: dict[str, Tensor] = field(default_factory=dict)  # what `continue_by_token` has computed

    @cached_property
    def right(self) -> Tensor:
        """Logits (1, t, V) of the first row, by itself, without a cache."""
        return self.logits(self.ids[:1])

    def draw(self, length: int) -> Tensor:
        """Other random tokens, (1, length), of those of `ids`."""
        at = torch.randint(self.ids.numel(), (1, length), generator=torch.Generator().manual_seed(1))
        return self.ids.flatten()[at]

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @cached_property
    def rounding(self) -> float:
        """What rounding to float32 explains."""
        with self.precision():
            return measure_rounding(self.model, self.right[0], self.ids[:1], torch.float32)

    @cached_property
    def cache_name(self) -> str:
        """What the model calls the cache that it returns. Raises NotApplicable where it returns none."""
        self.step(self.ids[:1, :3])
        return self.cache_name

    def takes(self, name: str) -> bool:
        """Whether the model's forward has an argument of that name."""
        return name in inspect.signature(self.model.forward).parameters

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Within it, what the model casts to float32 stays in float64, if that is what it is run in."""
        if not self.exact:
            yield
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with WideCasts():
                yield
        finally:
            torch.set_default_dtype(before)

    def logits(self, ids: Tensor | None, **named: Any) -> Tensor:
        """Of one forward without a cache."""
        with torch.no_grad(), self.precision():
            return self.model(input_ids=ids, **{"use_cache": False} | named).logits

    def step(self, ids: Tensor | None, cache: Any = None, **named: Any) -> tuple[Tensor, Any]:
        """Logits of a forward that goes on from a cache, and the cache that it returns. Raises NotApplicable for none."""
        if cache is not None:
            named[self.cache_name] = cache
        with torch.no_grad(), self.precision():
            output = self.model(input_ids=ids, use_cache=True, **named)
        name, cache = find_cache(output)
        if cache is None:
            raise NotApplicable("it returns no cache")
        self.cache_name = name
        return output.logits, cache

    def pieces(
        self, ids: Tensor, sizes: list[int], *, mask: bool = False, positions: bool = False, cache: Any = None, start: int = 0
    ) -> Tensor:
        """Logits of pieces of so many tokens, each going on from the cache of the one before."""
        parts, end = [], start
        for piece in ids.split(sizes, dim=1):
            begin, end = end, end + piece.shape[1]
            logits, cache = self.step(piece, cache, **self.named(begin, end, mask=mask, positions=positions, rows=len(ids)))
            parts.append(logits)
        return torch.cat(parts, 1)

    def named(self, begin: int, end: int, *, mask: bool = False, positions: bool = False, rows: int = 1) -> dict[str, Tensor]:
        """What a forward of the tokens from `begin` to `end` is told: a mask of all tokens up to there, and position_ids."""
        named = {}
        if mask:
            named["attention_mask"] = torch.ones(rows, end, dtype=torch.long)
        if positions:
            named["position_ids"] = torch.arange(begin, end).expand(rows, -1)
        return named

    def ways(self) -> dict[str, dict[str, bool]]:
        """With and without a mask and position_ids, as far as the forward takes them."""
        ways = {"plain": {}, "with a mask": {"mask": True}}
        if self.takes("position_ids"):
            ways |= {"with position_ids": {"positions": True}, "with both": {"mask": True, "positions": True}}
        return ways

    def continue_by_token(self, way: str) -> tuple[Tensor, Tensor]:
        """The first row's logits in pieces of BY_TOKEN, in one of these ways, computed once; and what is right."""
        if way not in self.by_token:
            self.by_token[way] = self.pieces(self.ids[:1, : sum(BY_TOKEN)], BY_TOKEN, **self.ways()[way])
        return self.by_token[way], self.right[:, : sum(BY_TOKEN)]

    @cached_property
    def good_way(self) -> dict[str, bool]:
        """The fullest of these ways in which a cache is continued rightly, token by token. Other laws of caches go on so, and a
        fault is told by one law. Raises NotApplicable where there is none."""
        for way, named in reversed(self.ways().items()):
            try:
                found, right = self.continue_by_token(way)
            except NotApplicable:
                raise
            except Exception:
                continue
            if (found - right).abs().max() <= self.bound(self.right):
                return named
        raise NotApplicable("its cache is not continued rightly token by token")

    def generate(self, ids: Tensor, new: int = 6, **named: Any) -> Any:
        """Greedy decoding: `.sequences`, and `.logits` of every new token."""
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": PAD, "use_cache": True}
        options |= {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
        given = {name: named.pop(name) for name in list(named) if hasattr(GenerationConfig(), name)}
        with torch.no_grad(), self.precision():
            generate: Any = self.model.generate
            return generate(ids, generation_config=GenerationConfig(**options | given), **named)

    def continue_by_generate(self, prompt: int, new: int, **named: Any) -> tuple[Tensor, Tensor]:
        """Logits of every new token behind so many of the first row, as `generate` finds them, and as one forward of the whole
        text does."""
        made = self.generate(self.ids[:1, :prompt], new, **named)
        return torch.stack(made.logits, 1), self.logits(made.sequences)[:, prompt - 1 : -1]

    def judge(self, name: str, found: Tensor, right: Tensor, own: float | None = None) -> Case:
        """A case from its two logits. own: its own bound."""
        if found.shape != right.shape:
            return Case(name, "wrong", math.inf, 0.0, f"logits of the shape {tuple(found.shape)}, not {tuple(right.shape)}")
        bound = self.bound(right) if own is None else own
        apart = (found.double() - right.double()).abs()
        apart = apart.masked_fill((found == right) & (right < 0), 0)  # padded words may be at -inf
        difference = math.inf if not torch.isfinite(apart).all() else apart.max().item()
        if difference <= bound and difference < math.inf:
            return Case(name, "right", difference, bound, "")
        where = ""
        if apart.dim() == 3:  # the token at which it is largest, and the first one at which there is any to speak of
            tokens = apart.nan_to_num(math.inf).amax(dim=(0, 2))
            worst = int(tokens.argmax())
            first = int((tokens >= tokens[worst] / 100).nonzero()[0])
            where = f"token {worst}" if first == worst else f"token {worst}, from token {first} on"
        return Case(name, "wrong", difference, bound, where)

    def bound(self, right: Tensor) -> float:
        """How far apart two right computations of these logits may be."""
        largest = right.nan_to_num(0, 0, 0).abs().max().item()
        return EXACT * max(1.0, largest) if self.exact else self.rounding


class WideCasts(TorchFunctionMode):
    """What is cast to, or made in, float32 is in float64 instead. So a model in float64 is run in it whole."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        elif id(torch.float32) in (places := [*map(id, args)]):
            place = places.index(id(torch.float32))
            args = (*args[:place], torch.float64, *args[place + 1 :])
        if kwargs and kwargs.get("dtype") is torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **(kwargs or {}))


class Narrow(TorchDispatchMode):
    """Notes whether anything is computed in less than float64."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
                self.seen = True
        return result


def subject_of(model: PreTrainedModel, *, wide: bool = True) -> Subject:
    """What laws are asked of: a copy of the model on the CPU, in float64 if all of it runs so, else in float32."""
    config = model.config.get_text_config(decoder=True)
    vocabulary = min(int(config.vocab_size), 1000)
    chunk = next(
        (getattr(config, n) for n in ("chunk_size", "mamba_chunk_size", "block_size") if getattr(config, n, None)), None
    )
    length = max(70, min(chunk or 0, 256) + 9)
    if most := getattr(config, "max_position_embeddings", None):
        length = max(SHORTEST, min(length, most - 8))  # pads stand beside it
    first = min(3, vocabulary // 3)  # beyond special tokens, where there are some to choose from
    ids = torch.randint(first, vocabulary, (4, length), generator=torch.Generator().manual_seed(0))
    copied = prepared(model)
    if wide:
        subject = Subject(copied.double(), ids, model, chunk)
        narrow = Narrow()
        try:
            with narrow:
                subject.logits(ids[:1, :9])
        except Exception:
            narrow.seen = True
        if not narrow.seen:
            return subject
        copied = prepared(model)
    return Subject(copied.float(), ids, model, chunk, exact=False, dtype=torch.float32)


def prepared(model: PreTrainedModel) -> PreTrainedModel:
    """A copy on the CPU in eval mode, with experts in plain PyTorch, which alone know float64."""
    copied = copy.deepcopy(model).cpu().eval()
    copied.generation_config = GenerationConfig()  # what a folder asks of generate, beams or a static cache, is no law's case
    if hasattr(copied, "set_experts_implementation"):
        copied.set_experts_implementation("eager")
    return copied
