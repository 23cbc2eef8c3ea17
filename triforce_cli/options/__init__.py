"""The command line's options: declarations, settings, and the request that they make."""
