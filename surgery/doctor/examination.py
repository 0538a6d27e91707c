"""What can be done with a model, by its configuration alone: which layers can be grafted, how they are located, and as what the
hybrid can be exported. No weight is read and nothing is computed: models are built on the meta device.

Nothing here knows a rule. Whether a layer can be grafted says splice, which asks the family; which mixers there are, anatomy;
what a hybrid can be written as, each format; what can be served, the engine's plugin. Their refusals are the reasons.
"""

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Literal

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from surgery.errors import UserError
from surgery.exporting.engines import engine_of, engine_why_not
from surgery.exporting.formats import names, of_bases, why_not
from surgery.families import families, family_of
from surgery.loading.empty import empty_model, read_config
from surgery.loading.hub import CONFIGURATION, local_folder, one_line
from surgery.locating.subject import is_graftable
from surgery.models.anatomy import Anatomy, Kind, MixerPlace, anatomy, check_decoder
from surgery.records.names import display_name
from surgery.records.plan import PATCH, Plan
from surgery.records.record import Marked, Record
from surgery.records.site import Site
from surgery.splicing.donor import donor_layer
from surgery.splicing.joining import Patch
from surgery.splicing.splice import hybrid_config

VLLM, OWN = "vllm", "hf"  # an engine that refuses some of what this format holds, and nothing in its other formats


class Exports(Record):
    """The formats in which a model can be written, and "vllm" where vLLM serves it in one of them. refused: the others -> why
    not."""

    possible: tuple[str, ...] = ()
    refused: dict[str, str] = {}


class Answer(Record):
    """Whether something is possible. why_not: "" if it is. exports: of the hybrid that it gives."""

    possible: bool
    why_not: str = ""
    exports: Exports | None = None


class MixerSummary(Record):
    """A mixer. module: its class in transformers. width: the columns of a head; of 1, a head is a channel."""

    kind: Kind
    module: str
    heads: int
    width: int


class Layers(Record):
    """Equal layers, by number from 0, and what can be done with each of them.

    mixers: by first head; of a layer that mixes channels alone there are none. heads: attention in place of some of its heads.
    layer: in place of its whole mixer. located: how its heads are ranked. donor_layer: whether a layer graft in
    another model can start from it.
    """

    layers: tuple[int, ...]
    mixers: tuple[MixerSummary, ...]
    located: tuple[Literal["splice attribution", "ablation"], ...]
    heads: Answer
    layer: Answer
    donor_layer: Answer

    def name(self) -> str:
        """Their numbers: "0-2,4"."""
        # Of numbers that follow one another, number and place differ by the same.
        runs = [[*run] for _, run in groupby(enumerate(self.layers), key=lambda pair: pair[1] - pair[0])]
        return ",".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else f"{run[0][1]}" for run in runs)


class Examination(Marked):
    """What can be done with a model.

    model_type: of the language model that it is, or holds. of: what a patch is on. depth: how many layers, as far as it is
    known. why_not: what keeps the whole model from being located in; "" if nothing does. exports: of the model as it is, where
    that is a hybrid, or a base that a format takes.
    """

    schema_version: int = 1
    model: str
    kind: Literal["base", "hybrid", "patch", "other"]
    model_type: str
    of: str | None = None
    depth: int | None = None
    why_not: str = ""
    layers: tuple[Layers, ...] = ()
    exports: Exports


def examine(name: str, trust_remote_code: bool = False) -> Examination:
    """Say what can be done with a model. name: a Hub id, a folder, an original folder, or a patch; only its configuration needs
    to be there. Raises UserError, in one line, for what is no model."""
    folder = local_folder(name, patterns=CONFIGURATION)
    patch = Patch.read(folder / PATCH) if (folder / PATCH).exists() else None
    config = read_config(folder, trust_remote_code)
    if reason := _refusal(_check_language_model, config):
        return Examination(
            model=display_name(name), kind="other", model_type=config.model_type, depth=_depth(config), why_not=reason,
            exports=_exports(config),
        )  # fmt: skip
    model = empty_model(config, name, trust_remote_code)
    own, parts = model.config, None
    if not (reason := _refusal(_check_family, own)) and not (reason := _refusal(anatomy, model)):
        parts = anatomy(model)
    return Examination(
        model=display_name(name),
        kind="patch" if patch else _kind(model, reason),
        model_type=own.model_type,
        of=None if patch is None else display_name(patch.base.name),
        depth=_depth(own),
        why_not=reason,
        layers=() if parts is None else tuple(_equal_layers(model, parts)),
        exports=_exports(own),
    )


def _kind(model: PreTrainedModel, reason: str) -> Literal["base", "hybrid", "other"]:
    if getattr(model.config, "grafts", None):
        return "hybrid"
    return "base" if is_graftable(model) and not reason else "other"


def _check_language_model(config: PreTrainedConfig) -> None:
    check_decoder(config)
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    if not known:
        raise UserError(f"transformers has no causal language model of the type {config.model_type}")


def _check_family(config: PreTrainedConfig) -> None:
    """As load() does."""
    if config.model_type in families():
        family_of(config).check(config)


def _depth(config: PreTrainedConfig) -> int | None:
    return getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)


def _equal_layers(model: PreTrainedModel, parts: Anatomy) -> list[Layers]:
    """What can be done with each kind of layer. Of layers whose modules are equal, and which serve as donors alike, the first
    is examined; then those are one of which the same is said."""
    groups: dict[Any, tuple[int, str, list[int]]] = {}
    said: dict[str, Layers] = {}
    for layer, block in enumerate(parts.blocks):
        donor = _refusal(donor_layer, model, layer, model.config.get_text_config(decoder=True).hidden_size)
        groups.setdefault((repr(block), _of_any_layer(donor, layer)), (layer, donor, []))[2].append(layer)
    for first, whole, layers in groups.values():
        mixers = parts.mixers_of(first)
        heads, whole_layer = (_graft(model, mixers, site) for site in (Site(first, (0,)), Site(first)))
        located: list[Literal["splice attribution", "ablation"]] = ["ablation"] if mixers else []
        group = Layers(
            layers=tuple(layers),
            mixers=tuple(
                MixerSummary(kind=m.kind, module=type(m.module).__name__, heads=m.heads, width=m.width) for m in mixers
            ),
            located=("splice attribution", *located) if heads.possible else tuple(located),
            heads=heads,
            layer=whole_layer,
            donor_layer=_answer(whole),
        )
        same = said.get(what := _of_any_layer(group.model_dump_json(exclude={"layers"}), first))
        numbers = (*(same.layers if same else ()), *layers)
        said[what] = (same or group).model_copy(update={"layers": tuple(sorted(numbers))})
    return list(said.values())


def _of_any_layer(text: str, layer: int) -> str:
    """What is said of a layer, without its number."""
    return re.sub(rf"\b(L|layer ){layer}\b", "", text)


def _graft(model: PreTrainedModel, mixers: Sequence[MixerPlace], site: Site) -> Answer:
    """Whether attention can take the place of a layer's head, or of its mixer."""
    if model.config.model_type not in families() and mixers and all(mixer.kind == "attention" for mixer in mixers):
        return _answer("it is attention already")  # and no family is missing
    plan = Plan(kind="head" if site.heads else "layer", sites=(site,))
    try:
        return Answer(possible=True, exports=_exports(hybrid_config(model, plan)))
    except Exception as error:
        return _answer(_reason(error))


def _exports(config: PreTrainedConfig) -> Exports:
    """Of a hybrid; or of a model as it is, which only some formats take."""
    grafted = bool(getattr(config, "grafts", None))
    reasons = {name: _refusal(_check_export, name, config) for name in (names() if grafted else of_bases())}
    if grafted:
        reasons[VLLM] = engine_why_not(VLLM, OWN, config) or ""
        if any(not reasons[name] for name in engine_of(VLLM).FORMATS if name != OWN):
            reasons[VLLM] = ""
    return Exports(
        possible=tuple(name for name, reason in reasons.items() if not reason),
        refused={name: reason for name, reason in reasons.items() if reason},
    )


def _check_export(name: str, config: PreTrainedConfig) -> None:
    if reason := why_not(name, config):
        raise UserError(reason)


def _answer(reason: str) -> Answer:
    return Answer(possible=not reason, why_not=reason)


def _refusal(ask: Callable[..., Any], *args: Any) -> str:
    """Why something refuses, in one line; "" if it does not."""
    try:
        ask(*args)
    except Exception as error:
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    """Families and formats say what they refuse by a UserError. A configuration that nobody thought of may raise anything else,
    and that is a reason too."""
    return str(error) if isinstance(error, UserError) else one_line(error)
