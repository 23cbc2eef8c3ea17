"""Where a model's files come from: names, downloads, the embedded model."""
