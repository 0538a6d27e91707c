"""An opened checkpoint, and how verbs take their first arguments: a Checkpoint, or a model and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.records.plan import Plan


@dataclass
class Checkpoint:
    """A model in eval mode, its tokenizer, and what identifies it."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str


def model_of(base: Any, verb: str) -> PreTrainedModel:
    """The model that a verb was given, alone or in a Checkpoint. Raises UserError, in one line that says what to do, for
    anything else. verb: the function's name, for the message."""
    if isinstance(base, Checkpoint):
        return base.model
    if isinstance(base, PreTrainedModel):
        return base
    if isinstance(base, str | Path):
        raise UserError(f"surgery.{verb} takes a model, not its name; load it first: base = surgery.load({str(base)!r})")
    raise UserError(f"surgery.{verb} takes a model as surgery.load returns it, not {a_type(base)}")


def tokenizer_of(base: Any, tokenizer: Any, verb: str) -> PreTrainedTokenizerBase:
    """The tokenizer that a verb was given, or the Checkpoint's. Raises UserError if there is none, and for anything else."""
    if tokenizer is None and isinstance(base, Checkpoint):
        return base.tokenizer
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if tokenizer is None:
        raise UserError(f"surgery.{verb} needs a tokenizer beside the model, or a whole Checkpoint, as surgery.load returns it")
    raise UserError(f"surgery.{verb} takes a tokenizer as surgery.load(...).tokenizer is, not {a_type(tokenizer)}")


def plan_for(plan: Any, verb: str) -> Plan:
    """The plan that a verb was given. Raises UserError, in one line that says what to do, for anything else."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | Path):
        raise UserError(f"surgery.{verb} takes a plan, not its name; read it first: surgery.Plan.read({str(plan)!r})")
    raise UserError(f"surgery.{verb} takes a plan, as surgery.plan(ranking) returns it, not {a_type(plan)}")


def a_type(value: Any) -> str:
    """ "a dict", for a message."""
    return "None" if value is None else f"a {type(value).__name__}"
