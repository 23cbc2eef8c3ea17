"""From a name to weights: hubs, checkpoints, tokenizers."""
