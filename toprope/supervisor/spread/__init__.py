"""Runs the members of one crew on several nodes."""
