"""Chooses drafters and draft lengths by their measured times and acceptance."""
