"""Files of weights: safetensors, GGUF, quantised checkpoints."""
