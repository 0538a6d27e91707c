"""What report.json holds, as records. Every number in it was measured by bench.py in the run that wrote it. What shows them
reads these; the Report itself (report.py) lies above, since it shows itself."""

from collections.abc import Iterable
from functools import cache
from typing import Any

from pydantic import Field

from surgery.loading.digests import Conditions
from surgery.records.plan import Plan
from surgery.records.record import Provenance, Record, Sealed
from surgery.runtime.listing import literals
from surgery.statistics import Estimate, Evidence, Proportion

HITS, OTHERS = "recall_hits", "other_tokens"  # recall_hits.1024: in rows of 1,024 tokens
MIDDLE = 50  # needle.1024.50: one needle in a prompt of 1,024 tokens, at this depth, in percent
NEEDLES = ("needles", "needles_asked")  # one of several: needles.1024 in a prompt of 1,024 tokens


@cache
def losses() -> frozenset[str]:
    """The tasks whose results are losses, in nats per token, before the size: those that files of suites name in LOSSES."""
    return frozenset(name for file in literals("suites").values() for name in file.get("LOSSES", ()))


def is_loss(task: str) -> bool:
    """Whether less is better. task: as a report names it, perplexity or recall_hits.1024 say."""
    return task.partition(".")[0] in losses()


def needle_tasks(tasks: Iterable[str]) -> dict[str, dict[int, str]]:
    """Family -> length of the prompts -> task, for needles; of single ones, those in the middle."""
    result: dict[str, dict[int, str]] = {}
    for task in tasks:
        family, _, size = task.partition(".")
        length, _, depth = size.partition(".")
        if (family == "needle" and depth == str(MIDDLE)) or family in NEEDLES:
            result.setdefault(family, {})[int(length)] = task
    return {family: dict(sorted(of.items())) for family, of in result.items()}


class Perplexity(Record):
    """value: perplexity; loss: mean nats per token over windows, with its interval."""

    value: float
    loss: Estimate


class Cost(Record):
    """Decoding one token after `context` tokens, batch 1: the median time of the work (without that of other programs; before
    0.22 with it), and the bytes that the cache holds; cache_parts: as keys, values, recurrent state and convolution."""

    context: int
    milliseconds: float
    cache_bytes: int
    cache_parts: dict[str, int] = {}


class Speed(Record):
    """A batch of `batch` prompts of `context` tokens: median times of the whole prefill and of one more token each, the bytes
    that their cache holds, and the most memory that the prefill holds at once beyond weights and inputs. cache_parts: as for
    Cost."""

    context: int
    batch: int
    prefill_milliseconds: float
    decode_milliseconds: float
    cache_bytes: int
    peak_bytes: int
    cache_parts: dict[str, int] = {}


class Serving(Record):
    """In a serving engine, by its own benchmark client: `concurrency` requests at a time, each a prompt of `context` tokens
    after which `new_tokens` are written. Tokens written a second by all together; the median times to a request's first token,
    and for each further one. cache_bytes_per_token: reserved for each token of a request; state_bytes: for each request,
    however long. packages: the versions of the engine and of what it computes with."""

    context: int
    concurrency: int
    requests: int
    new_tokens: int
    tokens_per_second: float
    first_token_milliseconds: float
    token_milliseconds: float
    cache_bytes_per_token: int
    state_bytes: int
    packages: dict[str, str]


class ModelReport(Record):
    """One model's results, as far as the suites measured them. conditions: which weights, and with what they were measured.
    parameters: how many numbers, tied ones once. kv:
    by number of pairs. tasks: everything that has no field of its own, by its name: an accuracy, an Estimate where an example's
    score is not just right or wrong (of recall_hits and other_tokens the loss in nats per token), or a Perplexity. change: the
    paired difference to the base on the same examples (accuracies, and "perplexity" and "sliding" as the difference of the mean
    loss in nats). evidence: what the differences say. seeds: where there are several, the mean of each one. guessing: of the
    base, what guessing gives: the accuracy on knowledge, and of perplexity the loss of guessing among all tokens,
    log(vocabulary). invented: of the base, the settings whose text or facts are of the built-in models' small world, where it
    is not one of them."""

    description: str
    plan: Plan | None
    parameters: int | None = None
    conditions: Conditions | None = None
    kv: dict[str, Proportion] = {}
    knowledge: Proportion | None = None
    letters: Proportion | None = None
    perplexity: Perplexity | None = None
    tasks: dict[str, Proportion | Estimate | Perplexity] = {}
    cost: tuple[Cost, ...] = ()
    speed: tuple[Speed, ...] = ()
    serving: tuple[Serving, ...] = ()
    change: dict[str, Estimate] = {}
    evidence: dict[str, Evidence] = {}
    seeds: dict[str, tuple[float, ...]] = {}
    guessing: dict[str, float] = Field(default={}, exclude_if=lambda guessing: not guessing)  # which reports before 0.21 lack
    invented: tuple[str, ...] = Field(default=(), exclude_if=lambda invented: not invented)

    def results(self) -> dict[str, Proportion | Estimate | Perplexity]:
        """Everything that was measured example by example, by the task's name."""
        named = {"knowledge": self.knowledge, "letters": self.letters, "perplexity": self.perplexity}
        own = {name: result for name, result in named.items() if result is not None}
        return {f"kv.{size}": result for size, result in self.kv.items()} | own | self.tasks


class Located(Record):
    """What the heads were located by: the probe in words, the base's accuracy on it, and that of guessing."""

    probe: str
    accuracy: Proportion
    chance: float


def value(result: Proportion | Estimate | Perplexity) -> float:
    """The one number of a result: an accuracy, a mean score, a perplexity."""
    return result.accuracy if isinstance(result, Proportion) else result.value


def count(result: Proportion | Estimate | Perplexity) -> int:
    """Its examples."""
    return result.loss.n if isinstance(result, Perplexity) else result.n


class Results(Sealed):
    """models: by name, the base first. plan: the graft's. located: how well the base does what its heads were located by; None
    in a comparison, which locates nothing. timings: seconds by stage. cpu: seconds of processor time by
    stage, of all threads and child processes; `start` is what came before the first stage. memory: by stage, the most bytes
    that the run and its child processes held at once (resident; on a GPU, what torch held there); of a comparison, that of
    bench alone. training: the last losses of each tuned model."""

    schema_version: int = 2

    provenance: Provenance
    plan: Plan | None
    located: Located | None = None
    models: dict[str, ModelReport]
    timings: dict[str, float]
    cpu: dict[str, float] = Field(default={}, exclude_if=lambda cpu: not cpu)  # which reports before 0.21 lack
    memory: dict[str, int] = {}
    training: dict[str, dict[str, float]]
    settings: dict[str, Any]

    @property
    def base(self) -> ModelReport:
        """The results of the base."""
        return next(iter(self.models.values()))

    def row_of(self, digest: str) -> str | None:
        """What the report calls the model with this digest; None if it measured no such weights."""
        measured = ((name, model.conditions) for name, model in self.models.items())
        return next((name for name, under in measured if under is not None and under.model == digest), None)

    def __getitem__(self, name: str) -> ModelReport:
        """The results of one model."""
        return self.models[name]
