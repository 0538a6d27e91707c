"""A model on its way through locate, prune and the sweeps, with all that they need to know about it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.families import families
from surgery.hybrids.layer_graft import brings_only_layers
from surgery.loading.digests import Conditions, conditions, fingerprint
from surgery.loading.opened import Checkpoint, model_of, tokenizer_of
from surgery.models.anatomy import Anatomy, anatomy
from surgery.splicing.remembered import opened, remembered_tokenizer
from surgery.splicing.splice import adopt


@dataclass(frozen=True, eq=False)
class Subject:
    """A model in eval mode, its tokenizer, and where its mixers and heads are. name: what records call it.

    known_fingerprint: the model's, where it was computed already; a pass over the weights of a large model takes a while. init:
    how grafts start that are tried (Plan.init).
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    anatomy: Anatomy
    name: str = "base"
    known_fingerprint: str | None = None
    init: Literal["dual", "induction"] = "dual"

    @classmethod
    def of(
        cls, base: PreTrainedModel | Checkpoint, tokenizer: PreTrainedTokenizerBase | None = None, name: str | None = None,
        *, verb: str = "locate", known_fingerprint: str | None = None,
    ) -> "Subject":  # fmt: skip
        """The subject of a model and its tokenizer, or of a Checkpoint. A model that surgery.load opened knows its tokenizer
        and its name. It is adopted where its family has grafts; its tensors are shared. verb: the public function that was
        called, for messages.

        Raises UserError for arguments of another type, and if the layout of the model is not known (models/anatomy.py).
        """
        given = model_of(base, verb)
        tokenizer = tokenizer_of(base, remembered_tokenizer(given) if tokenizer is None else tokenizer, verb)
        model = adopt(given).eval()
        if name is None:
            name = known.name if (known := opened(base)) else "base"
        return cls(model, tokenizer, anatomy(model), name, known_fingerprint)

    @property
    def graftable(self) -> bool:
        """Whether grafts can be put into the model: its family has them, and it holds none yet."""
        return is_graftable(self.model)

    @cached_property
    def conditions(self) -> Conditions:
        """On what and with what it is measured, with the kernels that are chosen when this is first read."""
        return conditions(self.model, self.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """The base's, as records name it."""
        return self.known_fingerprint or fingerprint(self.model)


def is_graftable(model: Any) -> bool:
    """Whether grafts can be put into a model: its family has them, and it holds none yet, but for whole layers of its own."""
    return model.config.model_type in families() and brings_only_layers(model.config)
