"""Interpreters of environments: no dependency set holds all ecosystems, so each has a Python of its own.

registry    what the owner added, in one file of the home
store       the virtual environments, by the digest of what is installed in them
installing  pip or uv, its words and its failures
adding      from what an owner names to an entry of the registry
known       every interpreter that environments may be found in
"""
