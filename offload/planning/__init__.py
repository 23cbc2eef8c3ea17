"""Plans: the memory and the time that a request takes, computed before anything is loaded."""
