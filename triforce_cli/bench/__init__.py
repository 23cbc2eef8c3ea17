"""`bench`: methods x contexts x temperatures on one prompt; lossy modes beside the exact one."""
