"""Interpreters of environments: ecosystems have conflicting dependencies, so each gets its own Python.

registry    entries that the owner added, in one file of the home
store       virtual environments by the digest of their packages
installing  runs pip or uv
adding      turns the owner's order into an entry of the registry
known       every interpreter that may have environments
"""
