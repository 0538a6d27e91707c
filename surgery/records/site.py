"""A site: the serialisable address of a layer or of heads in a layer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from surgery.errors import UserError
from surgery.records.reading import shown

MOST = 2**31 - 1
DIGITS = 20  # of a number that is read at all


@dataclass(frozen=True, order=True)
class Site:
    """`L17` (a layer), `L17.H3` (a head) or `L36.H1565,1906` (several heads of one layer). Heads are sorted and distinct."""

    layer: int
    heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", tuple(sorted(set(self.heads))))
        if self.layer < 0 or any(head < 0 for head in self.heads):
            raise UserError("a site's layer and heads count from 0")
        if max(self.layer, *self.heads, 0) > MOST:
            raise UserError(f"no model has a layer or a head of the number {shown(max(self.layer, *self.heads), 20)}")

    def __str__(self) -> str:
        return f"L{self.layer}" + (f".H{','.join(map(str, self.heads))}" if self.heads else "")

    def each(self) -> "tuple[Site, ...]":
        """One site a head."""
        return tuple(Site(self.layer, (head,)) for head in self.heads)

    @classmethod
    def parse(cls, text: str) -> "Site":
        match = re.fullmatch(r"L(\d+)(?:\.H(\d+(?:\s*,\s*\d+)*))?", text.strip(), flags=re.ASCII)
        if match is None:
            raise UserError(f"'{text}' is not a site; write L17, L17.H3 or L36.H1565,1906")
        if max(map(len, re.findall(r"\d+", text))) > DIGITS:
            raise UserError(f"no model has the site {shown(text, 40)}")
        layer, heads = match.groups()
        numbers = tuple(map(int, heads.split(","))) if heads else ()
        check_distinct(numbers, text)
        return cls(int(layer), numbers)


def check_distinct(heads: tuple[int, ...], text: str) -> None:
    """Raise UserError for a head that is named twice: another one may have been meant."""
    if len(set(heads)) < len(heads):
        raise UserError(f"'{text}' names a head twice")


def split_sites(given: Any) -> Any:
    """The sites of a list as users write one: "L0.H3,5", "L0.H3,5, L1.H2" (or with `;`), or a sequence of such texts and of
    Sites. A number is one more head of the site before it: YAML divides [L0.H3,5] at its comma. None stays None.

    Raises UserError, naming it, for what is no site.
    """
    if given is None:
        return None
    parts = given if isinstance(given, list | tuple) else [given]
    sites: list[Site] = []
    for part in parts:
        if isinstance(part, str) and not part.strip().isdecimal():
            sites += [Site.parse(text) for text in re.split(r"\s*[,;]\s*(?=L)|\s+(?=L)", part.strip())]
        elif isinstance(part, Site):
            sites.append(part)
        elif isinstance(part, int | str) and not isinstance(part, bool) and sites and sites[-1].heads:
            check_distinct((*sites[-1].heads, int(part)), f"{sites[-1]},{part}")
            sites[-1] = Site(sites[-1].layer, (*sites[-1].heads, int(part)))
        else:
            raise UserError(f"'{part}' is not a site; write L17, L17.H3 or L36.H1565,1906")
    return tuple(sites)


# A Site as it appears in JSON and YAML: its text.
SiteText = Annotated[
    Site,
    BeforeValidator(lambda value: Site.parse(value) if isinstance(value, str) else value),
    PlainSerializer(str, return_type=str),
]
# A list of sites, in every way in which users write one.
SitesText = Annotated[tuple[SiteText, ...], BeforeValidator(split_sites)]


def shortened(sites: Sequence[Site]) -> str:
    """Sites, counted where there are too many to name."""
    named = ", ".join(map(str, sites))
    if len(named) <= 60:
        return named
    counts = [(len(site.heads), site) for site in sites]
    return ", ".join(f"{n} head{'s' * (n > 1)} of L{site.layer}" if n else str(site) for n, site in counts)
