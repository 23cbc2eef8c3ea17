"""Helpers shared by tests: tiny models, references, and fakes of hardware and terminals."""
