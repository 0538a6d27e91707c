"""`surgery doctor`: which kernel serves which operation here and why, and what that is worth."""

from surgery.doctor.benchmark import GROUPS, Benchmark, benchmark
from surgery.doctor.diagnosis import Diagnosis, diagnose
from surgery.doctor.tables import cell_rows, describe, verdict_rows

__all__ = ["GROUPS", "Benchmark", "Diagnosis", "benchmark", "cell_rows", "describe", "diagnose", "verdict_rows"]
