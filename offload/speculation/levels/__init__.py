"""The levels of the hierarchy: each drafts for the one below, which verifies."""
