"""Diagnosis: rules over a run's metrics, the same for live runs in the keeper and for stored rows."""

from toprope.analysis.findings.diagnosis import RULES, Diagnosis, diagnose, headline

__all__ = ["RULES", "Diagnosis", "diagnose", "headline"]
