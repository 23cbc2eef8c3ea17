"""Training of EAGLE-3 heads (arXiv 2503.01840): the texts, the target's rows over them, the head, its optimisation."""
