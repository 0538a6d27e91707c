"""The models that are measured, by name: those that are held all the time, and those that are opened for their turn."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.loading.digests import Conditions, conditions
from surgery.records.plan import Plan
from surgery.splicing.splice import adopt


@dataclass(frozen=True)
class Unheld:
    """A model that is not held between its turns. name: as load() takes it. open: opens it. measured_under: what it is measured
    on and with; writing: how it writes (see `writing`)."""

    name: str
    open: Callable[[], PreTrainedModel]
    measured_under: Conditions
    writing: dict[str, Any]


@dataclass
class Entry:
    """A model to measure, and how to call it in the report. measured_under: what it is measured on and with, if known."""

    source: PreTrainedModel | Unheld
    description: str
    plan: Plan | None = None
    measured_under: Conditions | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The model of an entry that holds it."""
        assert not isinstance(self.source, Unheld)
        return self.source


class ModelPool(Mapping[str, PreTrainedModel]):
    """The models of some entries, by name, adopted and in eval mode. Of those that are not held one is there at a time: the
    last that was asked for. So ask for all of one before the next."""

    def __init__(self, entries: Mapping[str, Entry]):
        self.entries = entries
        self.held = {name: adopt(e.model).eval() for name, e in entries.items() if not isinstance(e.source, Unheld)}
        self._turn: tuple[str, PreTrainedModel] | None = None
        self.parameters = {name: parameters(model) for name, model in self.held.items()}  # of others, once they were there

    def __getitem__(self, name: str) -> PreTrainedModel:
        if name in self.held:
            return self.held[name]
        if self._turn is None or self._turn[0] != name:
            source = self.entries[name].source
            assert isinstance(source, Unheld)
            self._turn = None  # before the next one is opened
            self._turn = name, adopt(source.open()).eval()
            self.parameters[name] = parameters(self._turn[1])
        return self._turn[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def together(self) -> list[list[str]]:
        """The names of those that can be there at once: all that are held, then each of the others."""
        return [list(self.held), *([name] for name in self if name not in self.held)]

    def measured_under(self, name: str, tokenizer: PreTrainedTokenizerBase, words: str) -> Conditions:
        """What a model is measured on and with, as conditions() has it."""
        entry = self.entries[name]
        if isinstance(entry.source, Unheld):
            return entry.source.measured_under
        return entry.measured_under or conditions(self.held[name], tokenizer, words=words)

    def writing(self, name: str) -> dict[str, Any]:
        """How a model writes, without opening it."""
        source = self.entries[name].source
        return source.writing if isinstance(source, Unheld) else writing(self.held[name])


def parameters(model: PreTrainedModel) -> int:
    """How many numbers a model has, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def writing(model: PreTrainedModel) -> dict[str, Any]:
    """What decides how a model writes, beside its weights: where it stops, above all."""
    settings = model.generation_config.to_diff_dict() if model.generation_config is not None else {}
    return {name: value for name, value in settings.items() if name not in ("transformers_version", "_from_model_config")}
