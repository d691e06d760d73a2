"""Runs a program without site packages in the simulation: `python -I -S run_simulated.py FILE ...`."""

import os
import runpy
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import simulation  # noqa: E402

sys.path.pop(0)
sys.argv.pop(0)
simulation.install()
simulation.note(os.path.basename(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
