"""Sweeps: search and evolution of settings over runs."""
