"""The terminal, and all that is written to it."""
