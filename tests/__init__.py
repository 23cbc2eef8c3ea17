"""The tests, in folders named after the packages that they are about."""
