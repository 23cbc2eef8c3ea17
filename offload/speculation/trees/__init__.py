"""Token trees: their shapes, acceptance and verification. A chain is a tree of one branch."""
