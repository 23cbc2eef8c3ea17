"""Numbers that the Triton kernels' callers share."""

ROWS = 64  # tokens of a pass at most: a prompt's chunks are bound by arithmetic, which torch's kernels do better
PLAIN, BLOCKS = 0, 1  # layouts of keys and values, see attend.py
