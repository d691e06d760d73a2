"""Data sets of rollouts: capture, filter, synthesise and export, with lineage."""
