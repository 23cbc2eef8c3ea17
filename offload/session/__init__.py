"""Sessions: one sequence with its caches, what is kept of it between requests, and the copy of a model that drafts."""
