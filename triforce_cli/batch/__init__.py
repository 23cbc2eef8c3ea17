"""Many prompts in a file, answered over one loaded model: several at once, as JSON lines in the order of finishing."""
