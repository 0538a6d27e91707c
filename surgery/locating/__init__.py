"""Locate: score every layer and head of a base by what ablating and splicing it does to a probe."""
