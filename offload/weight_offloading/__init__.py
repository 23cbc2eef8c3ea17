"""Weights that do not stay on the device: layers that are streamed, experts on the host."""
