"""Runs passes of a model over a cache, recorded or as CUDA graphs."""
