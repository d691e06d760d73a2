"""Who looks at a run while nobody does: findings, budgets, disk, stalls, provenance. Each is a file of its own."""
