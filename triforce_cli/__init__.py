"""The command line: the only place with typer, rich, print, the environment and exit codes."""
