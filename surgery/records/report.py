"""The report: what bench measured of a base and of the models beside it, and whether the edit helped."""

from typing import Any, Literal

from surgery.records.ranking import Estimate
from surgery.records.record import Provenance, Record
from surgery.records.site import SitesText

Answer = Literal["yes", "mixed", "unclear", "no", "not judged"]
Remedy = Literal["", "lower rate", "more heads"]


class Measurement(Record):
    """What all models were asked: the same questions, one number a question."""

    label: str
    """In plain words: "dictionaries of 64 pairs"."""
    short: str
    """The heading of a column: "64 pairs"."""
    metric: Literal["accuracy", "loss"]
    """accuracy: the share of right answers, or a score from 0 to 1; more is better. loss: nats per token; less is better."""
    chance: float | None = None
    """What guessing gives, where that is known."""
    digest: str
    """sha256 of what was asked: the questions or texts and their tokens."""


class Change(Estimate):
    """A model's difference to another one on the same questions, paired."""

    p: float
    """Two-sided. Of the main comparison as it is; of all others corrected by Holm's method, among themselves."""
    detectable: float | None = None
    """The smallest true difference that four of five such measurements would find."""

    @property
    def shown(self) -> bool:
        """Whether a difference is shown: p is below 5%, and the interval leaves out 0."""
        return self.p < 0.05 and (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


class Cost(Record):
    """What reading and decoding take at one length, measured in turn with the base, in one run."""

    context: int
    """Tokens in the cache."""
    batch: int
    cache_bytes: int
    milliseconds: float
    """Median of a decoded token, of processor time on a CPU, of time on the wall on a GPU."""
    token: Estimate
    """Time of a decoded token divided by the base's; n rounds."""
    reading: Estimate | None = None
    """Time of reading the context divided by the base's. For the suite speed."""


class OnText(Record):
    """How a model differs from its base on held-out text, and where its grafts act."""

    kl: Estimate
    """KL divergence of the model from the base, in nats per token; the interval is over documents."""
    documents: int
    tokens: int
    """Of all documents together."""
    untouched: int
    """Documents in which no logit differs from the base's."""
    acts: Estimate | None = None
    """The share of tokens at which any graft acts; the interval is over documents. For head grafts, as the next field."""
    change_before: float | None = None
    """The largest change of any logit before the first token at which a graft acts."""

    def sentence(self) -> str:
        """For the card and the verdict."""
        kl = f"{self.kl.mean:.2g} nats per token [{self.kl.low:.2g}, {self.kl.high:.2g}]"
        if self.acts is None:
            return f"On held-out text its divergence from the base is {kl}."
        if self.acts.mean == 1:
            return f"A graft acts at every token; the divergence from the base on held-out text is {kl}."
        said = (
            f"On held-out text a graft acts at {100 * self.acts.mean:.2g}% of the tokens, all of the base's "
            f"logits are kept in {self.untouched} of {self.documents} texts, and the divergence from the base is {kl}"
        )
        if self.change_before:
            return f"{said}; before a graft first acts, a logit changes by {self.change_before:.2g} at most."
        return f"{said}; before a graft first acts, every logit is the base's in the same code, bit for bit."


class ModelReport(Record):
    """One model, as it was when it was measured."""

    description: str
    """In plain words: "2 located heads, tuned"."""
    role: Literal["base", "hybrid", "control"]
    fingerprint: str
    """sha256 of configuration and tensors, taken when the model was measured."""
    sites: SitesText = ()
    """Where it has grafts."""
    trained: int | None = None
    """How many numbers were trained, where that is known."""
    back_to: int | None = None
    """The step whose weights it has, since its loss rose after it (tune.steps=auto)."""
    results: dict[str, Estimate]
    """Measurement -> mean and interval over questions or documents."""
    changes: dict[str, Change] = {}
    """Measurement -> difference to the base."""
    behind: Change | None = None
    """Of a control: the main model's difference to it, in the main measurement."""
    costs: tuple[Cost, ...] = ()
    on_text: OnText | None = None


class Verdict(Record):
    """Whether the main model is better than the base."""

    answer: Answer
    model: str
    """The main model: declared before anything was measured."""
    measurement: str
    """The main measurement, declared likewise."""
    sentence: str
    """One sentence that begins with the answer."""
    details: tuple[str, ...] = ()
    """Sentences on controls, what was lost, the gate and the price."""
    advice: str = ""
    """What to try next, where nothing was gained."""
    remedy: Remedy = ""
    """What of the advice `surgery run` turns into a command."""


class Report(Record):
    """What was measured, and the verdict."""

    schema_version: Literal[2] = 2
    verdict: Verdict
    measurements: dict[str, Measurement]
    models: dict[str, ModelReport]
    """By name; the base is the first."""
    settings: dict[str, Any] = {}
    """Section bench of the recipe."""
    provenance: Provenance

    @property
    def base(self) -> ModelReport:
        """The model that the others are compared with."""
        return next(iter(self.models.values()))

    @property
    def main(self) -> ModelReport:
        """The model that the verdict is about."""
        return self.models[self.verdict.model]

    def best_control(self, measurement: str | None = None) -> str | None:
        """The name of the control that does best, by default in the main measurement."""
        name = measurement or self.verdict.measurement
        sign = -1 if self.measurements[name].metric == "loss" else 1
        controls = {key: m.results[name].mean for key, m in self.models.items() if m.role == "control" and name in m.results}
        return max(controls, key=lambda key: sign * controls[key], default=None)

    def rows(self) -> list[str]:
        """The models of a short table: the base, the main model, its best control."""
        control = self.best_control()
        names = [next(iter(self.models)), self.verdict.model, *([control] if control else [])]
        return list(dict.fromkeys(names))

    def columns(self) -> list[str]:
        """The measurements of a short table: the main one first, then the largest size of every other kind."""
        main = self.verdict.measurement
        kinds = ["kv_unseen", "multiple_choice", "knowledge", "text", "bigrams", "needle"]
        sizes = [[name for name in self.measurements if name.partition(".")[0] == kind] for kind in kinds]
        named = [max(names, key=_size) for names in sizes if names]
        return list(dict.fromkeys([main, *(named if set(named) - {main} else self.measurements)]))[:6]

    def summary(self) -> str:
        """For a terminal: the verdict, three rows, the price."""
        columns = self.columns()
        table = [["", *(self.measurements[name].short for name in columns)]]
        for row in self.rows():
            results = self.models[row].results
            table.append([self.models[row].description, *(figure(results.get(name)) for name in columns)])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in table]
        said = [f"Did it help? {self.verdict.sentence}", "", *lines, "", *self.verdict.details]
        return "\n".join([*said, *([self.verdict.advice] if self.verdict.advice else [])])

    __str__ = summary


def figure(estimate: Estimate | None) -> str:
    """A figure of a table: three decimals; none from a thousand on; a dash where nothing was measured."""
    if estimate is None:
        return "-"
    return f"{estimate.mean:.3f}" if abs(estimate.mean) < 1000 else f"{estimate.mean:,.0f}"


def _size(measurement: str) -> int:
    size = measurement.partition(".")[2]
    return int(size) if size.isdecimal() else 0
