"""Drafters: n-grams of the text, a draft model, a trained head, the target on selected chunks."""
