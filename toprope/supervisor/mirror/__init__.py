"""Runs on clusters that share no folder with the server.

The cluster keeps the run folder (`far`), and the server has a copy of it (`receiver`), which every reader takes for the
run. Nodes of a cluster can usually reach the machine that submits to it, seldom the other way round, so the keeper
connects: it sends what is new and takes orders with the answer. Both sides derive the run's key, its token and its
certificate from a file that the owner put on both, so no key travels.

The cluster's folder is the truth. A file is sent from the offset up to which the server has it, together with the
SHA-256 of what lies before; if that differs, both find what they have in common, or the file goes anew. So whatever is
cut or restarted, nothing is lost or repeated. If the engine's job ends before everything has arrived, a small job
brings the rest, and the end of the run with it.
"""
