"""Describes models by numbers: dimensions, RoPE, well-known models. Knows neither weights nor memory."""
