"""A conversation about documents, at a prompt or over a pipe."""
