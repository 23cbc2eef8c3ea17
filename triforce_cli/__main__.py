"""`python -m triforce_cli`."""

from .app import main

main()
