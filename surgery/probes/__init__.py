"""Probes: synthetic tasks with a metric that exposes retrieval, or watches over everything else.

One file per probe. A probe of the choice kind makes `Question`s from a seed; `surgery.probes.scoring` answers them.
"""
