"""What ranking.json holds: the scores of all sites, in their order. What draws them reads these; the Ranking itself
(ranking.py) lies above, since it shows itself."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from surgery.loading.digests import Conditions
from surgery.locating import heads_file
from surgery.locating.heads import ORDER, Heads, Score, ScoreName, gain
from surgery.locating.skill_scores import SkillScores
from surgery.locating.stability import Stability
from surgery.records.record import Provenance, Sealed
from surgery.records.site import Site, SiteText
from surgery.runtime.ownership.files import put
from surgery.statistics import Estimate, Proportion

LISTED = 1_000  # heads in ranking.json, where there are more than MANY, and arrays beside it
MANY = 16_384


class RankedHeads(Sealed):
    """Heads, best place for a graft first (or, in a family without grafts, the one whose ablation costs most), and whole
    layers in order. drawn: heads that were measured exactly not because they led but at random, as a control of what did
    not lead. base_accuracy: of the base on the questions; chance: that of guessing. stability: whether other questions rank
    the same heads first, if that was asked. skills: what the heads do to other skills of the base. init: how the grafts started
    that were measured (Plan.init). arrays: only in a file that does not list all heads. conditions, questions: which weights
    were ranked, with what, and a digest of what they were asked."""

    provenance: Provenance
    conditions: Conditions | None = None
    questions: str | None = None
    probe: dict[str, Any]
    base_accuracy: Proportion
    chance: float | None = None
    base_loss: Estimate
    heads: Heads
    layers: tuple[Score, ...]
    init: Literal["dual", "induction"] = Field(default="dual", exclude_if=lambda init: init == "dual")
    drawn: tuple[SiteText, ...] = ()
    stability: Stability | None = None
    skills: tuple[SkillScores, ...] = Field(default=(), exclude_if=lambda skills: not skills)
    arrays: heads_file.Arrays | None = Field(default=None, exclude_if=lambda arrays: arrays is None)

    @property
    def score(self) -> ScoreName:
        """What the leading heads are sorted by."""
        best = gain(self.heads[0])[0] if self.heads else 0
        return next((name for order, name in ORDER if order == best), "splice_loss")

    @property
    def columns(self) -> Heads:
        """The heads' scores as arrays, whatever a copy of this ranking was given for its heads."""
        return Heads.of(self.heads)

    def write(self, path: str | Path) -> None:
        """Write a JSON file. Of more than MANY heads it lists the first LISTED, and an array file of the same name beside it
        (NAME.DIGEST.safetensors, by its content) holds all."""
        if len(self.heads) <= MANY:
            super().write(path)
            return
        path = Path(path)
        self.check_place(path)
        arrays = heads_file.write(self.columns, path)
        leading = self.columns.take(slice(LISTED))
        listing = self.model_copy(update={"heads": leading, "arrays": arrays})
        put(path, listing.text().encode(), own=self.wrote)

    @classmethod
    def read(cls, path: str | Path, *, unsealed: Literal["refuse", "say", "take"] = "say") -> Self:
        """As Sealed.read, with the array file beside it, if it names one."""
        ranking = super().read(path, unsealed=unsealed)
        if ranking.arrays is None:
            return ranking
        heads = heads_file.read(ranking.arrays, Path(path).parent)
        return ranking.model_copy(update={"heads": heads, "arrays": None})

    def at_risk(self, sites: Iterable[Site]) -> dict[str, tuple[str, ...]]:
        """Skill -> those of single heads that a graft costs it (SkillScores.at_risk)."""
        named = set(sites)
        risks = {skill.name: tuple(str(site) for site in skill.at_risk if site in named) for skill in self.skills}
        return {name: heads for name, heads in risks.items() if heads}

    def also_for(self, site: Site) -> list[str]:
        """The names of the other skills that a head serves, or that a graft there costs."""
        return [skill.name for skill in self.skills if site in skill.serving or site in skill.at_risk]
