"""Diagnosis as code: rules over a run's trajectory, the same ones live in the keeper and over stored rows."""

from toprope.analysis.findings.diagnosis import RULES, Diagnosis, diagnose, headline

__all__ = ["RULES", "Diagnosis", "diagnose", "headline"]
