"""What is asked of the operating system: memory, files, processes with limits."""
