"""Keeps crews: start, watch, stop, list."""
