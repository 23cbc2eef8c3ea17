"""Sessions: one sequence with its caches and what is kept of it between requests."""
