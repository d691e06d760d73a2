"""What runs leave on disk, and the types that travel between the processes of a run."""
