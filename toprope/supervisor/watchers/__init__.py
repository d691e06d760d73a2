"""Watchers observe a run for its keeper: findings, budget, disk, stalls, provenance."""
