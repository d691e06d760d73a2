"""Search and evolution over runs."""
