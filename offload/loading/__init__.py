"""Find a model by name, read its checkpoint and load its weights and tokenizer."""
