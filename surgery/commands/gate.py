"""Requirements on a comparison, for a CI: "no loss", "kv.64 >= base + 0.3", "tuned.knowledge >= base - 0.01".

    no loss  |  [MODEL.]TASK  >= | <= | > | <  NUMBER | MODEL [+ | - | * NUMBER]

"no loss": no skill of the base falls beyond its bound (judgement.lost).

Without a model on the left, every model but the base has to meet it. On the right, a model stands for its own value of the same
task, and `base` for the base's, whatever it is called. Values are the report's: accuracies, mean scores, perplexities.
"""

import operator
import re
from dataclasses import dataclass

from surgery.errors import UserError
from surgery.evaluation.judgement import said_of_losses
from surgery.evaluation.results import Results, value

NO_LOSS = "no loss"
COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
CHANGES = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
NAME = r"[^\s<>=*+-][^\s<>=]*"
FORM = re.compile(rf"({NAME})\s*(>=|<=|>|<)\s*(?:({NUMBER})|({NAME})(?:\s+([-+*])\s*({NUMBER}))?)")


@dataclass(frozen=True)
class Requirement:
    """models: those that have to meet it. other: the model that `number` is added to, taken from or multiplied with; None where
    there is only a number."""

    text: str
    models: tuple[str, ...]
    task: str
    comparison: str
    other: str | None
    change: str
    number: float

    def failures(self, report: Results) -> list[str]:
        """One line for each model that does not meet it, with by how much."""
        lines = []
        for name in self.models:
            results = report.models[name].results()
            if self.task not in results:  # longer than the models' context, say
                lines.append(f"requirement '{self.text}' failed: {self.task} of {name} was not measured")
                continue
            has, bound, source = value(results[self.task]), self.number, ""
            if self.other is not None:
                bound = CHANGES[self.change](value(report.models[self.other].results()[self.task]), self.number)
                source = f" ({self.other} {self.change} {self.number:g})"
            if not COMPARISONS[self.comparison](has, bound):
                lines.append(
                    f"requirement '{self.text}' failed: {self.task} of {name} is {has:.4g}, not {self.comparison} "
                    f"{bound:.4g}{source}: off by {abs(has - bound):.2g}"
                )
        return lines


@dataclass(frozen=True)
class NoLoss:
    """That the models keep what the base can do."""

    models: tuple[str, ...]

    def failures(self, report: Results) -> list[str]:
        """One line for each model that does not."""
        losses = {name: said_of_losses(report, name) for name in self.models}
        return [f"requirement '{NO_LOSS}' failed: {name} loses {said}" for name, said in losses.items() if said]


def requirement(text: str, models: list[str], tasks: list[str]) -> Requirement | NoLoss:
    """Read one. models: as in the report, the base first. Raises UserError for what cannot be read or is not measured."""
    if text.strip() == NO_LOSS:
        return NoLoss(tuple(models[1:]))
    match = FORM.fullmatch(text.strip())
    if not match:
        raise UserError(
            f"--require takes '{NO_LOSS}', TASK >= NUMBER or TASK >= MODEL + NUMBER (or <=, >, <; -, *), not '{text}'"
        )
    left, comparison, alone, other, change, number = match.groups()
    held: list[str] = models[1:]
    task = left
    if task not in tasks:
        held = [name for name in models if left.startswith(f"{name}.") and left[len(name) + 1 :] in tasks]
        if not held:
            raise UserError(f"--require '{text}': '{left}' is not measured; there are {', '.join(tasks)}")
        task = left[len(held[0]) + 1 :]
    if other is not None and other not in (*models, "base"):
        blanks = " (put blanks around +, - and *)" if {*other} & {*CHANGES} else ""
        raise UserError(f"--require '{text}': no model is named '{other}'{blanks}; there are {', '.join(models)}")
    if other == "base" and "base" not in models:
        other = models[0]
    return Requirement(text, tuple(held), task, comparison, other, change or "+", float(alone or number or 0))
