"""Copies a run's figures to experiment trackers from the run's own files."""
