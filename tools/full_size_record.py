"""recipes/full-size.json: what stages of the job at full size took, as tools/full_size.py measures them."""

from surgery.records.record import Environment, Marked, Record

GIB = 2**30


class Foretold(Record):
    """What `surgery run --dry-run` said of a recipe: seconds, and bytes of memory and of disk."""

    seconds: float
    memory: int
    disk: int


class Stage(Record):
    """One stage of one model. layers, vocabulary: its size. device: "cpu", or the memory of the GPU in GB. weights, peak,
    anonymous, files: bytes, see tools/peak_memory.py. limit: of the peak, 0 if there is none. foretold: by the stage estimate.
    failure: the last line that was printed by a stage that did not end well."""

    model: str
    stage: str
    layers: int
    vocabulary: int
    dtype: str
    device: str
    arguments: tuple[str, ...]
    environment: Environment
    seconds: float
    cpu_seconds: float
    weights: int
    peak: int
    anonymous: int
    files: int
    limit: int
    passed: bool
    foretold: Foretold | None = None
    failure: str | None = None

    def key(self) -> tuple:
        """Of what is the same stage, whoever measured it and when."""
        return self.model, self.stage, self.layers, self.vocabulary, self.dtype, self.device

    def line(self) -> str:
        limit = f" of {self.limit / GIB:.1f}" if self.limit else ""
        result = "passed" if self.passed else f"FAILED: {self.failure or 'beyond its limit'}"
        return (
            f"{self.stage}: {self.seconds:.0f} s ({self.cpu_seconds:.0f} s of CPU), peak {self.peak / GIB:.2f}{limit} GiB "
            f"({self.anonymous / GIB:.2f} of its own, {self.files / GIB:.2f} of mapped files), {result}"
        )


class FullSize(Marked):
    """recipes/full-size.json. stages: the last measurement of each, in the order in which they were first made."""

    schema_version: int = 1
    stages: tuple[Stage, ...] = ()

    def with_stage(self, stage: Stage) -> "FullSize":
        stages = {each.key(): each for each in self.stages} | {stage.key(): stage}
        return FullSize(stages=tuple(stages.values()))
