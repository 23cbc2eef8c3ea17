"""The operating system: free memory, usable cores, atomic files, scratch files, what differs between systems."""
