"""Data sets of rollouts: capture, filter, synthesise, export, and what they were made of."""
