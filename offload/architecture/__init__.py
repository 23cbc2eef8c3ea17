"""What a model is, as numbers: dimensions, RoPE, known models. Knows no weights and no memory."""
