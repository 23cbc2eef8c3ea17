"""`python -m triforce_cli`."""

from .entry import main

main()
