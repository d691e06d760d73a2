"""Whether an environment is fit to train on: what to ask its worker, and what the answers mean.

Defects of an environment are found by trying it: answers that are right, empty, junk and nearly right are scored, tasks
are made in two processes and held against each other, splits are held against each other. `probing` asks, `rules`
judges what was seen and is pure, `answers` and `texts` know what to try and when two texts are the same.
"""
