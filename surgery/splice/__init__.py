"""Splice: put a plan's grafts into a base, and take them out again."""

from surgery.splice.splice import adopt, check_sites, splice, unsplice

__all__ = ["adopt", "check_sites", "splice", "unsplice"]
