"""The forward pass of a decoder: layers, experts, linear attention. It asks a cache for attention."""
