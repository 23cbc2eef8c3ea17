"""`bench` over lists of settings and several prompts: their product, resumable."""
