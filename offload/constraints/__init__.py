"""Constrained answers: which tokens may follow, by the history of each row. llguidance is imported for one only."""
