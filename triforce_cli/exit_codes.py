"""The exit codes of the process. Imports nothing: the entry point needs it too."""

DONE = 0  # also when the reader of a pipe has closed it
FAILED = 1  # while running
WRONG_USE = 2
INTERRUPTED = 130  # Ctrl-C
SIGNALLED = 128  # + the number of any other signal
