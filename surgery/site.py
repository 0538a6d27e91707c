"""A site: the serialisable address of a layer or of heads in a layer."""

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from surgery.errors import UserError


@dataclass(frozen=True, order=True)
class Site:
    """`L17` (a layer), `L17.H3` (a head) or `L36.H1565,1906` (several heads of one layer). Heads are sorted and distinct."""

    layer: int
    heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", tuple(sorted(set(self.heads))))
        if self.layer < 0 or any(head < 0 for head in self.heads):
            raise UserError("a site's layer and heads count from 0")

    def __str__(self) -> str:
        return f"L{self.layer}" + (f".H{','.join(map(str, self.heads))}" if self.heads else "")

    def each(self) -> "tuple[Site, ...]":
        """One site a head."""
        return tuple(Site(self.layer, (head,)) for head in self.heads)

    @classmethod
    def parse(cls, text: str) -> "Site":
        match = re.fullmatch(r"L(\d+)(?:\.H(\d+(?:,\d+)*))?", text.strip())
        if match is None:
            raise UserError(f"'{text}' is not a site; write L17, L17.H3 or L36.H1565,1906")
        layer, heads = match.groups()
        return cls(int(layer), tuple(map(int, heads.split(","))) if heads else ())


# A Site as it appears in JSON and YAML: its text.
SiteText = Annotated[
    Site,
    BeforeValidator(lambda value: Site.parse(value) if isinstance(value, str) else value),
    PlainSerializer(str, return_type=str),
]
