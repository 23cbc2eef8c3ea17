"""Files, pipes, encodings and document formats -> text."""
