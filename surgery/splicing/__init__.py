"""Splice: put a plan's grafts into a base, and take them out again."""
