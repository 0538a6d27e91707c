"""How a hybrid is tuned."""

from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field

from surgery.records.sections.section import (
    FACTOR,
    MOST,
    ROWS,
    TOKENS,
    Count,
    Examples,
    Rows,
    Section,
    Steps,
    Width,
    check_tokens,
    check_weights,
    none_for_no,
)


class Lesson(Section):
    """Training examples: a probe's questions with their answers."""

    section = "tune.lessons"

    probe: str = "kv"
    """A probe by name (`surgery list probes`)."""
    options: dict[str, Any] = {}
    """The probe's options. An option given as [smallest, largest] is drawn anew for each batch."""
    queries: Count | None = None
    """How many questions follow one dictionary, 8 by default. For kv only; other probes ask one."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """How often this probe is drawn, relative to the other weights."""

    @pydantic.field_validator("options")
    @classmethod
    def _ordered(cls, options: dict[str, Any]) -> dict[str, Any]:
        ranges = {name: tuple(value) for name, value in options.items() if isinstance(value, list | tuple)}
        for name, ends in ranges.items():
            if len(ends) != 2 or not all(type(end) is int for end in ends) or ends[0] > ends[1]:
                raise ValueError(f"{name} is {list(ends)}; a range needs whole numbers, smallest <= largest")
        return options | ranges


class EarlyStopping(Section):
    """End the steps where the model has lost too much of what its base can do (data.skills), and keep the weights that retrieve
    best within both bounds."""

    section = "tune.early_stopping"

    eval_steps: Count = 25
    """Steps between two measurements."""
    accuracy: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """The accuracy on each skill may be this much below the base's."""
    perplexity: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """The perplexity may be above the base's by this share of it."""
    examples: Examples = 256
    """Questions about each skill, for each measurement."""
    windows: Examples = 32
    """Windows of text for each measurement."""


class Hints(Section):
    """Where the grafts are to look, as far as it is known: from the place where an answer is due at the span of the prompt
    that holds it, and from the token before a recall hit of text (tune.hit_weight) at where its pair occurred before. The
    loss on an answer moves attention only as far as attention is near it already."""

    section = "tune.hints"

    weight: float = Field(default=0.3, gt=0, le=FACTOR, allow_inf_nan=False)
    """Weight of the hints in the loss. A hint is minus the logarithm of the attention that grafted heads pay to the span that
    holds an answer, or to the pair of a hit: the mean over answers and over hits."""


class Rename(Section):
    """Gives rare tokens of the text other names: in every document anew, and alike throughout it. A base knows the names of the
    text that it was trained on by heart, and such hits do not teach it to look for them in the context."""

    section = "tune.rename"

    rare: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """How often, per million tokens of data.train_text, a token may occur to be exchanged for another of the same kind: letters
    of the same script, with or without a space before them and with or without a capital. Tokens that never occur there may be
    used, too."""


class Lora(Section):
    """Adapters on the base that learn together with the grafts, by peft."""

    section = "tune.lora"

    target_modules: Annotated[tuple[str, ...] | dict[str, Width], Field(min_length=1)]
    """Names of modules within the blocks, or how they end (in_proj, 3.mixer.in_proj); or a mapping of those to a rank each."""
    r: Width = 8
    """The rank."""
    lora_alpha: float = Field(default=16.0, gt=0, le=FACTOR, allow_inf_nan=False)
    """Adapters are scaled by lora_alpha / r."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on an adapter's input."""


class Tune(Section):
    """How the grafts are trained. Each step sees a batch of training examples of one probe (lessons), and a batch of text on
    which the hybrid is held to its base by a KL term. Several processes divide every batch."""

    section = "tune"

    steps: Annotated[Steps | Literal["auto"], Field(union_mode="left_to_right")] = 150
    """Training steps. auto: until the loss on examples and text that are kept back is flat; the learning rate stays at its
    largest until then, and falls over the share `decay` of all steps: if that is 1, a quarter. The controls of a run then take
    as many."""
    max_steps: Steps = 1000
    """The most steps, where steps is auto."""
    batch_size: Rows = 16
    """Sequences of training examples in a step."""
    lessons: tuple[Lesson, ...] = (Lesson(options={"pairs": (4, 64)}),)
    """The probes that teach retrieval (section tune.lessons): each step draws one, by weight. []: only recall hits of text
    teach it (hit_weight)."""
    text_batch_size: int = Field(default=4, ge=0, le=ROWS)
    """Rows of text in a step."""
    text_tokens: int = Field(default=192, ge=2, le=TOKENS)
    """Tokens of a row of text. Shorter documents share a row."""
    kl_weight: float = Field(default=1.0, ge=0, le=FACTOR, allow_inf_nan=False)
    """Weight of the KL divergence from the base on text."""
    skill_weight: float = Field(default=1.0, ge=0, le=FACTOR, allow_inf_nan=False)
    """Weight of the KL divergence from the base on the answers to questions about its other skills (data.skills)."""
    skill_batch_size: Rows = 16
    """Such questions in a step."""
    hit_weight: float = Field(default=0.0, ge=0, le=FACTOR, allow_inf_nan=False)
    """Weight of the loss on recall hits of the text: tokens that complete a pair seen before in their document and rare in
    data.train_text. They are learnt from the text itself. The KL divergence leaves them out, because the base misses them.
    Hits from far back need long rows (text_tokens)."""
    rare: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """Where hits have a weight: how often, per million tokens of data.train_text, their pair may occur."""
    learning_rate: float = Field(default=3e-3, gt=0, le=FACTOR, allow_inf_nan=False)
    """The largest learning rate; after the warm-up it falls to 0 along a cosine."""
    decay: float = Field(default=1.0, gt=0, le=1)
    """The share of the steps, at the end, over which the learning rate falls. Before them it stays at its largest."""
    warmup_steps: int = Field(default=10, ge=0, le=MOST)
    """Steps over which the learning rate rises."""
    save_steps: Count = 50
    """Steps between two checkpoints, from which --resume continues; one is also written every 5 minutes and on Ctrl-C."""
    hints: Hints | None = None
    """What tells the grafts where the answers of training examples and the pairs of recall hits are (section tune.hints). {}
    for its defaults."""
    rename: Rename | None = None
    """What keeps a base from knowing the recall hits of its own training text by heart (section tune.rename). {} for its
    defaults."""
    early_stopping: EarlyStopping | None = None
    """What ends the steps early (section tune.early_stopping). {} for its defaults."""
    lora: Lora | None = None
    """Adapters on the base that learn together with the grafts (section tune.lora)."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Compute states within blocks again on the backward pass: less memory, more time, the same result. auto: where they would
    not fit into memory; with divided models (FSDP, ZeRO 3) only true does so."""
    gradient_accumulation_steps: Count = 1
    """Divide a batch into this many parts that go through the model one after the other: less memory, the same result."""
    mixed_precision: Annotated[Literal["bf16"] | None, pydantic.BeforeValidator(none_for_no)] = None
    """bf16: compute in bfloat16, keep what is trained in float32. A model stored in bfloat16 or float16 is always tuned so."""
    report_to: tuple[str, ...] = ()
    """Trackers that the log also goes to, by accelerate (tensorboard, wandb, ...)."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.batch_size < self.gradient_accumulation_steps:
            raise ValueError(
                f"gradient_accumulation_steps: a batch of {self.batch_size} sequences cannot be divided into "
                f"{self.gradient_accumulation_steps} parts"
            )
        check_tokens(text_batch_size=self.text_batch_size, text_tokens=self.text_tokens)
        if self.early_stopping is not None:
            check_tokens(text_tokens=self.text_tokens, windows=self.early_stopping.windows)
        check_weights(lesson.weight for lesson in self.lessons)
        if self.hit_weight and not self.text_batch_size:
            raise ValueError("hit_weight: hits are found in text, and text_batch_size is 0")
        if self.rename and not self.hit_weight:
            raise ValueError("rename: is for text whose recall hits are learnt; set hit_weight, or leave rename out")
        if not (self.lessons or self.hit_weight):
            raise ValueError("lessons: is empty, so that nothing teaches retrieval; set hit_weight, or leave lessons out")
        return self

    @property
    def most_steps(self) -> int:
        """The number of steps, or the most that there may be."""
        return self.max_steps if self.steps == "auto" else self.steps
