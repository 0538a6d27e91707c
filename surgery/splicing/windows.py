"""Windows of a plan: which groups of keys they are in the model's own attention, and whether they can be had."""

import random
from typing import Any

from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.families import family_of
from surgery.hybrids.layer_graft import LayerGraftMixer
from surgery.hybrids.windows import attention_in, window_spec
from surgery.models.anatomy import MixerPlace, anatomy
from surgery.records.plan import Plan, PlanWindows, merged
from surgery.records.site import Site


def grafts_of_base(base: PreTrainedModel) -> list[dict[str, Any]]:
    """The entries of a hybrid configuration's `grafts` that a base brings which is a hybrid itself. Nothing tunes these."""
    return [spec | {"of_base": True} for spec in getattr(base.config, "grafts", None) or ()]


def grafts_beneath(config: Any) -> list[dict[str, Any]]:
    """The entries that the base of a hybrid has, of the hybrid's configuration."""
    grafts = [spec for spec in getattr(config, "grafts", None) or () if spec.get("of_base")]
    return [{name: value for name, value in spec.items() if name != "of_base"} for spec in grafts]


def window_specs(base: PreTrainedModel, windows: PlanWindows | None) -> list[dict[str, Any]]:
    """The entries of a hybrid configuration's `grafts` for the windows of a plan. Raises UserError for heads that are none of
    an attention, or not all that share keys, and for an attention that can have no windows."""
    if windows is None:
        return []
    whole = anatomy(base)
    whole.check(windows.sites)
    specs = []
    for site in windows.sites:
        parts = {whole.mixer_of(head).first: whole.mixer_of(head) for head in site.each()}
        place = next(iter(parts.values()))
        if len(parts) > 1 or place.kind != "attention":
            raise UserError(f"{site} cannot have a window: only heads of an attention can")
        each = shared(base, place)
        numbers = [head - place.first for head in site.heads]
        groups = sorted({number // each for number in numbers})
        if len(groups) * each != len(numbers):
            raise UserError(f"{site} cannot have a window: every {each} heads of that layer share keys, and have it together")
        specs.append(window_spec(site.layer, groups, windows.first, windows.length))
    return specs


def shared(base: PreTrainedModel, place: MixerPlace) -> int:
    """How many heads of an attention share keys. Raises UserError where it can have no windows."""
    if isinstance(place.module, LayerGraftMixer):
        return place.module.graft.num_heads // place.module.graft.num_key_value_heads
    family: Any = family_of(base.config)
    try:
        attention = attention_in(anatomy(base).blocks[place.layer], family.hybrid.stock_mixer, base.config)
    except ValueError as error:
        raise UserError(f"the attention of L{place.layer} in a {family.model_type} can have no windows: {error}") from error
    return int(attention.num_key_value_groups)


def attention_groups(base: PreTrainedModel) -> list[Site]:
    """All groups of attention heads that share keys, each as a site. Raises UserError where one can have no windows."""
    groups = []
    for place in anatomy(base).mixers:
        if place.kind == "attention":
            each = shared(base, place)
            starts = range(place.first, place.first + place.heads, each)
            groups += [Site(place.layer, tuple(range(start, start + each))) for start in starts]
    return groups


def random_windows(base: PreTrainedModel, chosen: Plan, seed: int) -> Plan | None:
    """A control: the plan with windows for as many groups, drawn uniformly from all choices but its own. None where it has no
    windows, or all groups have one."""
    if chosen.windows is None:
        return None
    groups, taken = attention_groups(base), {head for site in chosen.windows.sites for head in site.each()}
    own = [group for group in groups if taken >= {*group.each()}]
    if not 0 < len(own) < len(groups):
        return None
    generator, drawn = random.Random(f"random windows {seed}"), own
    while drawn == own:
        drawn = sorted(generator.sample(groups, len(own)), key=groups.index)
    return chosen.model_copy(update={"windows": chosen.windows.model_copy(update={"sites": merged(drawn)})})
