"""From logits to tokens: warp, penalties, noise."""
