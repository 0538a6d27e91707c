"""Locate: score every layer and head of a base by what ablating and splicing it does to a probe."""

from surgery.locate.locate import locate
from surgery.locate.ranking import Ranking, Score, plan, random_plan

__all__ = ["Ranking", "Score", "locate", "plan", "random_plan"]
