"""Experiments: what a paper published beside what is planned and measured here; each is a YAML file."""
