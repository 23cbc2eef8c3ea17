"""Drafters, verification and the levels between them."""
