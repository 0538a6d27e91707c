"""The address of a layer, or of heads in one layer."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from surgery.errors import UserError

PATTERN = re.compile(r"L(\d{1,9})(?:\.H(\d{1,9}(?:\s*,\s*\d{1,9})*))?", flags=re.ASCII)


@dataclass(frozen=True, order=True)
class Site:
    """`L17` (a layer), `L17.H3` (a head) or `L36.H1565,1906` (heads of one layer, sorted and distinct).

    A head is the smallest unit with a mixing matrix of its own: an SSD head in Mamba-2, an attention head in a Transformer, one
    channel in Mamba-1, where the unit of a ranking is a block of channels, e.g. `L1.H3,17,40`.
    """

    layer: int
    heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", tuple(sorted(set(self.heads))))
        if self.layer < 0 or any(head < 0 for head in self.heads):
            raise UserError("a site's layer and heads count from 0")

    def __str__(self) -> str:
        return f"L{self.layer}" + (f".H{','.join(map(str, self.heads))}" if self.heads else "")

    @property
    def head_names(self) -> list[str]:
        """The name of each of its heads alone: `L1.H3,5` is `L1.H3` and `L1.H5`."""
        return [str(Site(self.layer, (head,))) for head in self.heads]

    @property
    def name(self) -> str:
        """As str, but many heads are shortened to `L0.H5,24,+14`, for people."""
        if len(self.heads) <= 4:
            return str(self)
        return f"{Site(self.layer, self.heads[:2])},+{len(self.heads) - 2}"

    @classmethod
    def parse(cls, text: str) -> "Site":
        """Raises UserError for a text that is no site, or that names a head twice."""
        match = PATTERN.fullmatch(text.strip())
        if match is None:
            raise UserError(f"'{text[:40]}' is not a site; write L17, L17.H3 or L36.H1565,1906")
        layer, heads = match.groups()
        numbers = tuple(map(int, heads.split(","))) if heads else ()
        if len(set(numbers)) < len(numbers):
            raise UserError(f"'{text}' names a head twice")
        return cls(int(layer), numbers)


def merge_sites(sites: Iterable[Site]) -> tuple[Site, ...]:
    """One site a layer, in order: `L1.H3` and `L1.H6` become `L1.H3,6`."""
    layers: dict[int, tuple[int, ...]] = {}
    for site in sites:
        layers[site.layer] = (*layers.get(site.layer, ()), *site.heads)
    return tuple(Site(layer, heads) for layer, heads in sorted(layers.items()))


def parse_sites(given: Any) -> Any:
    """Sites from what users write: "L0.H3,5", "L0.H3,5; L1.H2", or a list of such texts and of Sites. In a list, a number is
    one more head of the site before it, because YAML divides [L0.H3,5] at its comma."""
    if given is None:
        return None
    sites: list[Site] = []
    for part in given if isinstance(given, list | tuple) else [given]:
        if isinstance(part, Site):
            sites.append(part)
        elif isinstance(part, str) and not part.strip().isdecimal():
            sites += [Site.parse(text) for text in re.split(r"\s*[,;]\s*(?=L)|\s+(?=L)", part.strip())]
        elif isinstance(part, int | str) and not isinstance(part, bool) and sites and sites[-1].heads:
            sites[-1] = Site(sites[-1].layer, (*sites[-1].heads, int(part)))
        else:
            raise UserError(f"'{part}' is not a site; write L17, L17.H3 or L36.H1565,1906")
    return tuple(sites)


def _validator(parse: Callable[[Any], Any]) -> BeforeValidator:
    """For pydantic, which adds the field's name to the message."""

    def validate(value: Any) -> Any:
        try:
            return parse(value)
        except UserError as error:
            raise ValueError(str(error)) from error

    return BeforeValidator(validate)


SiteText = Annotated[
    Site,
    _validator(lambda value: Site.parse(value) if isinstance(value, str) else value),
    PlainSerializer(str, return_type=str),
]
"""A Site that JSON and YAML hold as its text."""

SitesText = Annotated[tuple[SiteText, ...], _validator(parse_sites)]
"""A list of sites, in every way in which users write one."""
