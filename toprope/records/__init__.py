"""Files of runs, and the types that travel between the processes of a run."""
