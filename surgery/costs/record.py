"""The estimate of a run, as a record, a table and advice."""

from surgery.records.record import Environment, Record
from surgery.runtime.memory import size
from surgery.runtime.progress import duration

SURE = 1.3  # the factor, either way, within which the time on an idle machine is expected
BUSY = 0.75  # programs that run or wait, for every CPU: with more, a machine is busy
SLOWED = 1.5  # times as long as on an idle one: the same

# What stages count, of one.
SINGULAR = {
    "forwards": "forward", "forwards and backwards": "forward and backward", "steps": "step", "models": "model",
    "plans measured": "plan measured",
    "heads and layers ablated or spliced in a batch": "head or layer ablated or spliced in a batch",
}  # fmt: skip


class Stage(Record):
    """What a stage of a run costs."""

    name: str
    seconds: float
    """Time, on an idle machine."""
    memory: int
    """The most bytes that the run holds at once meanwhile, with its child processes (on a GPU: there)."""
    disk: int = 0
    """Bytes that it leaves on the disk."""
    counts: dict[str, int] = {}
    """How often the stage does what costs most: forwards, steps."""
    at_most: bool = False
    """Whether it may turn out to be less, as that depends on results."""

    def time(self, slowed: float = 1.0, spread: float = SURE) -> str:
        """As a range, from an idle machine to one that is slowed down so many times; of what may be less, the upper end."""
        low, high = duration(self.seconds / spread), duration(self.seconds * spread * slowed)
        if self.at_most:
            return f"at most {high}"
        return high if low == high else f"{low} to {high}"

    def line(self, slowed: float = 1.0, spread: float = SURE) -> str:
        """As it is said when the stage starts: "tune tuned: 2 min to 3 min, 1.1 GiB"."""
        return f"{self.name}: {self.time(slowed, spread)}, {size(self.memory)}"

    def work(self) -> str:
        """What it counts: "3 models, 1 forward"."""
        return ", ".join(f"{n:,} {SINGULAR.get(what, what) if n == 1 else what}" for what, n in self.counts.items())


class CostEstimate(Environment):
    """What a run will cost on this machine, stage by stage. Nothing of it was written."""

    model: str
    stages: tuple[Stage, ...]
    available: int
    """Bytes that the run may hold on its device: what it holds already, and what is free."""
    free_disk: int
    """Free bytes of the disk that the output goes to."""
    tried: str
    """What was measured, where that was not the whole model."""
    assumptions: tuple[str, ...]
    """What is taken for granted until results are there."""
    advice: tuple[str, ...]
    """What to change where the run does not fit."""
    slowed: float
    """How many times as long as on an idle machine the work took that was timed."""
    load: float
    """Programs that ran or waited before the estimate began, for every CPU."""
    took: float
    """Seconds that the estimate itself took."""

    @property
    def seconds(self) -> float:
        """Of the whole run, on an idle machine."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def memory(self) -> int:
        """The most that the run holds at once, in bytes."""
        return max(stage.memory for stage in self.stages)

    @property
    def disk(self) -> int:
        """What the run leaves on the disk, in bytes."""
        return sum(stage.disk for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether memory and disk suffice."""
        return self.memory <= self.available and self.disk <= self.free_disk

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and body: a row for every stage, one for all of them, and one for what there is."""
        body = [
            [
                stage.name, stage.time(self.slowed), size(stage.memory),
                size(stage.disk) if stage.disk else "", stage.work(),
            ]
            for stage in self.stages
        ]  # fmt: skip
        whole = Stage(name="in all", seconds=self.seconds, memory=0)
        body.append(["in all", whole.time(self.slowed), size(self.memory), size(self.disk), ""])
        body.append(["this machine", "", size(self.available), size(self.free_disk), ""])
        return ["stage", "time", "peak memory", "disk", "what it does"], body

    def lines(self) -> list[str]:
        """What is below the table."""
        tried = f"Steps of tuning were timed on {self.tried}, and extended from there." if self.tried else ""
        return [line for line in (self.busy(), tried, *self.assumptions, *self.advice) if line]

    def busy(self) -> str:
        """A word on a machine that does other work; empty where it does none."""
        if self.load <= BUSY and self.slowed <= SLOWED:
            return ""
        return (
            f"This machine is busy: {self.load:.1f} programs for every CPU ran or waited, and work took "
            f"{self.slowed:.1f} times as long as on an idle one. The lower ends are of an idle machine, the upper ones of one "
            "that stays as it is now."
        )

    def __str__(self) -> str:
        header, body = self.table()
        widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
        rows = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (header, *body)]
        return "\n".join([*rows, *self.lines()])

    __repr__ = __str__


def fitting_advice(stage: Stage, held: int, available: int, settings: dict[str, int], remedy: str) -> str:
    """What to change where a stage does not fit: the smaller values of the settings that its memory beyond `held` goes with, in
    the share that is left for it, or, where not even one row fits, `remedy`."""
    needed = f"{stage.name} does not fit: it needs {size(stage.memory)}, and {size(available)} are there."
    beyond = max(1, stage.memory - held)
    share = (available - held) / beyond
    smaller = {key: max(1, int(value * share)) for key, value in settings.items()}
    if share <= 0 or all(value * share < 1 for value in settings.values()):
        return f"{needed} {remedy}"
    changes = " ".join(f"--set {key}={value}" for key, value in smaller.items() if value < settings[key])
    return f"{needed} Try {changes}."
